"""What a person asked of the controller: pause, resume, revert. Pages and commands write it, the loop reads it.

Kept as one small value of the store, so that a wish outlives restarts and each change of it is whole. A revert also
blocks: no push until a resume, whatever the engine remembers (an engine that restarts forgets its block). A revert and
a resume are things to do: the loop does them at the engine and then says ``done``. A resume ends the block that was
known when it was asked for: a later one, set at the engine since then, stands.
"""

import secrets
from typing import Annotated

from pydantic import Field, ValidationError

from rooftune.tuner.control.ports import Store
from rooftune.tuner.control.state.file import StoreError, StoreFault
from rooftune.tuner.record import Count, Part, Words

KEY = "wishes"
DONE_KEY = "wishes_done"
BLOCK_KEY = "engine_block"
Short = Annotated[str, Field(min_length=1, max_length=64)]


class Wish(Part):
    """Who asked for what is named by the field that holds it. at_s: wall clock, seconds since 1970.

    lifts: the block that a resume was asked to end, see ``Block.name``; "": none was known.
    """

    id: Short
    actor: Words
    reason: Words
    at_s: float
    lifts: Words = ""


class Block(Part):
    """The latest block that the loop found at the engine, or set there. revert: the wish it was set for, "": none."""

    boot_id: Words
    revision: Count
    revert: Words = ""

    @property
    def name(self) -> str:
        """A block has the revision that it made, and that one stays until it ends."""
        return f"{self.boot_id} {self.revision}"


class Wishes(Part):
    """paused, blocked: in force while set. revert, resume: the latest of each, done or not; see ``pending``."""

    paused: Wish | None = None
    blocked: Wish | None = None
    revert: Wish | None = None
    resume: Wish | None = None


def read(store: Store) -> Wishes:
    """All wishes. Raises StoreError when they cannot be read: unknown is not "not paused"."""
    found = _parsed(store.value(KEY))
    if found is None:
        message = (
            "the operator requests in the state file cannot be read; write them again with rooftune pause or resume"
        )
        raise StoreError(StoreFault.DAMAGED, message)
    return found


def paused(store: Store) -> bool:
    """Whether nothing may be pushed because a person paused."""
    return read(store).paused is not None


def blocked(store: Store) -> bool:
    """Whether nothing may be pushed because a person reverted and has not resumed."""
    return read(store).blocked is not None


def pause(store: Store, actor: str, reason: str, at_s: float) -> Wish:
    """No push until a resume; what is in force stays under its lease as long as the loop renews it."""
    wish = _wish(actor, reason, at_s)
    _change(store, paused=wish)
    return wish


def ask_revert(store: Store, actor: str, reason: str, at_s: float) -> Wish:
    """The engine back to its boot setting in the next cycle, and no push until a resume."""
    wish = _wish(actor, reason, at_s)
    _change(store, blocked=wish, revert=wish, resume=None)
    return wish


def resume(store: Store, actor: str, reason: str, at_s: float) -> Wish:
    """Pushes are allowed again: ends a pause and a block. A revert that is not done yet is still done first."""
    known = _known_block(store)
    wish = _wish(actor, reason, at_s, lifts="" if known is None else known.name)
    _change(store, paused=None, blocked=None, resume=wish)
    return wish


def saw_block(store: Store, boot_id: str, revision: int) -> None:
    """The engine says that it is blocked: a resume that is asked for from now on means this block."""
    known, found = _known_block(store), Block(boot_id=boot_id, revision=revision)
    if known is None or known.name != found.name:
        store.keep(BLOCK_KEY, found.model_dump_json())


def made_block(store: Store, boot_id: str, revision: int, wish: Wish) -> None:
    """The loop blocked the engine for this revert: a resume that waited behind it means this block."""
    store.keep(BLOCK_KEY, Block(boot_id=boot_id, revision=revision, revert=wish.id).model_dump_json())


def lifts(store: Store, wish: Wish, boot_id: str, revision: int) -> bool:
    """Whether this resume, the latest, means the block that the engine has now."""
    known, asked = _known_block(store), read(store).revert
    if known is None or known.name != Block(boot_id=boot_id, revision=revision).name:
        return False
    # A revert takes every resume back, so one that stands was asked for after it.
    return wish.lifts == known.name or (asked is not None and asked.id == known.revert)


def pending(store: Store) -> tuple[Wish | None, Wish | None]:
    """The revert and the resume that the loop has not done yet, in the order in which to do them."""
    wishes, finished = read(store), _done_ids(store)
    revert = wishes.revert if wishes.revert and wishes.revert.id not in finished else None
    resumed = wishes.resume if wishes.resume and wishes.resume.id not in finished else None
    return revert, resumed


def done(store: Store, wish: Wish) -> None:
    """The loop did it at the engine. Kept apart from the wishes, so that a new wish is never overwritten.

    What still stands among the wishes is never forgotten: a revert of long ago would be done once more.
    """
    known = _parsed(store.value(KEY)) or Wishes()
    stand = {one.id for one in (known.revert, known.resume) if one is not None}

    def make(text: str | None) -> str:
        ids = (text or "").split()
        return " ".join([*(i for i in ids[:-3] if i in stand), *ids[-3:], wish.id])

    store.change(DONE_KEY, make)


def is_done(store: Store, wish: Wish) -> bool:
    """Whether the loop has done this wish."""
    return wish.id in _done_ids(store)


def paused_after_damage(at_s: float) -> str:
    """The value of KEY for a state whose own wishes were lost."""
    wish = Wish(id="damaged", actor="rooftune", reason="the state file was damaged", at_s=at_s)
    return Wishes(paused=wish).model_dump_json()


def _wish(actor: str, reason: str, at_s: float, lifts: str = "") -> Wish:
    return Wish(id=secrets.token_hex(8), actor=actor[:200], reason=reason[:500], at_s=at_s, lifts=lifts)


def _known_block(store: Store) -> Block | None:
    """None for none, and for what cannot be read: then the next look tells."""
    text = store.value(BLOCK_KEY)
    try:
        return None if text is None else Block.model_validate_json(text)
    except ValidationError:
        return None


def _parsed(text: str | None) -> Wishes | None:
    """None for what cannot be read."""
    try:
        return Wishes() if text is None else Wishes.model_validate_json(text)
    except ValidationError:
        return None


def _change(store: Store, **changes: Wish | None) -> None:
    """In one go, so that two people who ask at once both get what they asked for.

    What is there and cannot be read counts as paused, which only a resume ends.
    """

    def make(text: str | None) -> str:
        unreadable = Wish(id="damaged", actor="rooftune", reason="unreadable wishes", at_s=0.0)
        known = _parsed(text) or Wishes(paused=unreadable)
        return known.model_copy(update=changes).model_dump_json()

    store.change(KEY, make)


def _done_ids(store: Store) -> list[str]:
    return (store.value(DONE_KEY) or "").split()

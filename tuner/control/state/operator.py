"""What an operator requested of the controller: pause, resume, revert. Pages and commands write it, the loop reads it.

Kept as one small value of the store, so that a request outlives restarts and each change of it is whole. A revert also
blocks: no push until a resume, whatever the engine remembers (an engine that restarts forgets its block). The loop does
a revert or a resume at the engine and then calls ``mark_done``. A resume ends the block that was known when it was
requested: a later one, set at the engine since then, stands.
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


class OperatorRequest(Part):
    """One request; the field that holds it says which. at_s: wall clock, seconds since 1970.

    lifts: the block that a resume was to end, see ``Block.name``; "": none was known.
    """

    id: Short
    actor: Words
    reason: Words
    at_s: float
    lifts: Words = ""


class Block(Part):
    """The latest block that the loop found at the engine, or set there for the request ``revert`` ("": found)."""

    boot_id: Words
    revision: Count
    revert: Words = ""

    @property
    def name(self) -> str:
        """A block has the revision that it made, and that one stays until it ends."""
        return f"{self.boot_id} {self.revision}"


class OperatorRequests(Part):
    """paused, blocked: in force while set. revert, resume: the latest of each, done or not; see ``pending``."""

    paused: OperatorRequest | None = None
    blocked: OperatorRequest | None = None
    revert: OperatorRequest | None = None
    resume: OperatorRequest | None = None


def read(store: Store) -> OperatorRequests:
    """All requests. Raises StoreError when they cannot be read: unknown is not "not paused"."""
    found = _parsed(store.value(KEY))
    if found is None:
        message = (
            "the operator requests in the state file cannot be read; write them again with rooftune pause or resume"
        )
        raise StoreError(StoreFault.DAMAGED, message)
    return found


def pause(store: Store, actor: str, reason: str, at_s: float) -> OperatorRequest:
    """No push until a resume; what is in force stays under its lease as long as the loop renews it."""
    request = _request(actor, reason, at_s)
    _change(store, paused=request)
    return request


def revert(store: Store, actor: str, reason: str, at_s: float) -> OperatorRequest:
    """The engine back to its boot setting in the next cycle, and no push until a resume."""
    request = _request(actor, reason, at_s)
    _change(store, blocked=request, revert=request, resume=None)
    return request


def resume(store: Store, actor: str, reason: str, at_s: float) -> OperatorRequest:
    """Pushes are allowed again: ends a pause and a block. A revert that is not done yet is still done first."""
    known = _known_block(store)
    request = _request(actor, reason, at_s, lifts="" if known is None else known.name)
    _change(store, paused=None, blocked=None, resume=request)
    return request


def note_block(store: Store, boot_id: str, revision: int) -> None:
    """The engine says that it is blocked: a resume requested from now on means this block."""
    known, found = _known_block(store), Block(boot_id=boot_id, revision=revision)
    if known is None or known.name != found.name:
        store.keep(BLOCK_KEY, found.model_dump_json())


def note_own_block(store: Store, boot_id: str, revision: int, request: OperatorRequest) -> None:
    """The loop blocked the engine for this revert: a resume that waited behind it means this block."""
    store.keep(BLOCK_KEY, Block(boot_id=boot_id, revision=revision, revert=request.id).model_dump_json())


def lifts(store: Store, request: OperatorRequest, boot_id: str, revision: int) -> bool:
    """Whether this resume, the latest, means the block that the engine has now."""
    known, latest = _known_block(store), read(store).revert
    if known is None or known.name != Block(boot_id=boot_id, revision=revision).name:
        return False
    # A revert cancels every resume before it, so one that stands was requested after it.
    return request.lifts == known.name or (latest is not None and latest.id == known.revert)


def pending(store: Store) -> tuple[OperatorRequest | None, OperatorRequest | None]:
    """The revert and the resume that the loop has not done yet, in the order in which to do them."""
    requests, finished = read(store), _done_ids(store)
    revert = requests.revert if requests.revert and requests.revert.id not in finished else None
    resume = requests.resume if requests.resume and requests.resume.id not in finished else None
    return revert, resume


def mark_done(store: Store, request: OperatorRequest) -> None:
    """The loop did it at the engine. Kept apart from the requests, so that a new one is never overwritten.

    The id of a request that still stands is never forgotten: a revert of long ago would be done once more.
    """
    known = _parsed(store.value(KEY)) or OperatorRequests()
    stand = {one.id for one in (known.revert, known.resume) if one is not None}

    def make(text: str | None) -> str:
        ids = (text or "").split()
        return " ".join([*(i for i in ids[:-3] if i in stand), *ids[-3:], request.id])

    store.change(DONE_KEY, make)


def is_done(store: Store, request: OperatorRequest) -> bool:
    """Whether the loop has done this request."""
    return request.id in _done_ids(store)


def paused_after_damage(at_s: float) -> str:
    """The value of KEY for a state whose own requests were lost."""
    return OperatorRequests(paused=_damaged("the state file was damaged", at_s)).model_dump_json()


def _request(actor: str, reason: str, at_s: float, lifts: str = "") -> OperatorRequest:
    return OperatorRequest(id=secrets.token_hex(8), actor=actor[:200], reason=reason[:500], at_s=at_s, lifts=lifts)


def _damaged(reason: str, at_s: float) -> OperatorRequest:
    return OperatorRequest(id="damaged", actor="rooftune", reason=reason, at_s=at_s)


def _known_block(store: Store) -> Block | None:
    """None for none, and for one that cannot be read: then the loop notes the engine's block in its next cycle."""
    text = store.value(BLOCK_KEY)
    try:
        return None if text is None else Block.model_validate_json(text)
    except ValidationError:
        return None


def _parsed(text: str | None) -> OperatorRequests | None:
    """None for what cannot be read."""
    try:
        return OperatorRequests() if text is None else OperatorRequests.model_validate_json(text)
    except ValidationError:
        return None


def _change(store: Store, **changes: OperatorRequest | None) -> None:
    """In one transaction, so that of two people at once neither loses a request.

    A value that cannot be read counts as paused, which only a resume ends.
    """

    def make(text: str | None) -> str:
        known = _parsed(text) or OperatorRequests(paused=_damaged("unreadable requests", 0.0))
        return known.model_copy(update=changes).model_dump_json()

    store.change(KEY, make)


def _done_ids(store: Store) -> list[str]:
    return (store.value(DONE_KEY) or "").split()

"""What a person asked for, done at the engine in any mode, whoever holds the lease: a revert first, then a resume."""

from contextlib import suppress

from rooftune.policies import wire
from rooftune.policies.guard import Action, Reason
from rooftune.tuner.control import wishes
from rooftune.tuner.control.book import Book
from rooftune.tuner.control.decide_stage import Verdict
from rooftune.tuner.control.draft import Draft
from rooftune.tuner.control.memory import knobs_of
from rooftune.tuner.control.parts import Store
from rooftune.tuner.control.push_stage import Sent, send
from rooftune.tuner.control.sight import Sighting
from rooftune.tuner.control.state_errors import StoreError
from rooftune.tuner.ports.base import Port


def over(book: Book, sight: Sighting) -> None:
    """Nothing of ours is in force any more."""
    book.end_trial(sight.day)
    book.change(kept=None)
    book.moved(sight.seen.state.boot_id, sight.seen.now_s)


class Asked:
    """Does at the engine what was asked for, and says that it is done."""

    def __init__(self, port: Port, store: Store, book: Book) -> None:
        self._port, self._store, self._book = port, store, book

    def do(self, sight: Sighting, draft: Draft) -> Verdict | None:
        """What is to do; the cycle's end where that is a revert, whether or not it could be done."""
        if sight.revert is not None:
            wish = sight.revert
            sent = self._revert(wish)
            if sent.reason is not None:
                return Verdict(Action.HOLD, sent.reason, detail=f"the revert asked for was not done: {sent.detail}")
            over(self._book, sight)
            if sent.revision is not None and not sight.seen.state.blocked:
                wishes.made_block(self._store, sight.seen.state.boot_id, sent.revision, wish)
            wishes.done(self._store, wish)
            draft.put(in_force=knobs_of(sight.seen.boot), lease_left_s=None, revision=sent.revision)
            return Verdict(Action.REVERT, Reason.BLOCKED_AFTER_REVERT, detail=f"asked for by {wish.actor}")
        if sight.resume is not None:
            draft.note(self._resumed(sight, sight.resume))
        return None

    def _resumed(self, sight: Sighting, wish: wishes.Wish) -> str:
        """What came of a resume. Where no block was seen none is lifted: one may have come since."""
        state = sight.seen.state
        if wishes.pending(self._store) != (None, wish):
            return ""  # somebody asked for something else since this cycle looked
        if state.blocked:
            if not wishes.lifts(self._store, wish, state.boot_id, state.revision):
                return f"{wish.actor} asked for a resume before this block was known, so it stands: ask for it again"
            sent = send(self._port, wire.ResumeRequest(actor=_text(wish.actor), reason=_text(wish.reason)))
            if sent.reason is not None:
                return f"resume: {sent.detail}"
        wishes.done(self._store, wish)
        return f"resumed for {wish.actor}"

    def revert(self, draft: Draft) -> Verdict | None:
        """The revert that a person asked for, in a cycle that failed before it came to it: it needs no rows, no model
        and no judgement. None when there is none, or it could not be done either."""
        try:
            wish, _ = wishes.pending(self._store)
        except StoreError:
            return None
        if wish is None:
            return None
        sent = self._revert(wish)
        if sent.reason is not None:
            draft.note(f"the revert asked for was not done: {sent.detail}")
            return None
        draft.put(in_force=None, lease_left_s=None, revision=sent.revision)
        with suppress(StoreError):  # then it is done once more, which changes nothing
            wishes.done(self._store, wish)
        return Verdict(Action.REVERT, Reason.BLOCKED_AFTER_REVERT, detail=f"asked for by {wish.actor}")

    def _revert(self, wish: wishes.Wish) -> Sent:
        return send(self._port, wire.RevertRequest(actor=_text(wish.actor), reason=_text(wish.reason), block=True))


def _text(words: str) -> str:
    """A person's words as the protocol takes them: one line, at most 200 characters, not empty."""
    kept = "".join(letter for letter in " ".join(words.split()) if letter.isprintable())
    return kept[:200] or "not stated"

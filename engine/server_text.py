"""From tokens to text, a token at a time: only whole characters leave, and never part of a stop string.

No tokenizer library here: ``Tokenizer`` says what the server needs of one.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

UNFINISHED = "\ufffd"  # what a decoder writes for bytes that are no character (yet)
_CONTEXT_TOKENS = 6
_MOST_WINDOW_TOKENS = 64  # decoded anew for every token, so it must not grow with the answer
# A character is at most 4 bytes. A longer run of these is no unfinished character but bytes that mean nothing.
_MOST_UNFINISHED = 16
_STILL_OPEN = 4


class Tokenizer(Protocol):
    """What the server needs of a tokenizer. Calls come from several threads."""

    @property
    def vocab_tokens(self) -> int:
        """Token ids are below this."""
        ...

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a text; special: with whatever the model wants in front of a prompt. Must leave other threads
        running meanwhile, for one of them turns the model."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the tokens, special ones left out; ``UNFINISHED`` where bytes are missing."""
        ...

    def chat_text(self, messages: Sequence[Mapping[str, str]]) -> str:
        """A conversation up to where the assistant speaks, special tokens in it. Raises InputError without a
        template."""
        ...


class Detokenizer:
    """Text of one growing answer. ``push`` returns what became certain; all pieces together are the whole text.

    prompt: the tokens before the answer; some tokenizers write the first word otherwise without them.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._window = _context(tokenizer, prompt)
        before = tokenizer.decode(self._window) if self._window else ""
        self._sent = len(_certain(before))
        self._prompts_own = before[self._sent :]  # an unfinished character of the prompt, for the answer to finish
        self._clean = 0 if self._prompts_own else len(self._window)  # here no character is cut

    def push(self, token: int) -> str:
        """What can be said after one more token, perhaps nothing."""
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        certain = _certain(text)
        piece = self._take(certain)
        if len(certain) == len(text) and piece:
            self._slide(self._clean, 0)
        elif len(self._window) > _MOST_WINDOW_TOKENS:  # special tokens only, or bytes that mean nothing
            self._slide(len(self._window) - _CONTEXT_TOKENS, len(text) - self._sent)
        return piece

    def finish(self) -> str:
        """What is left at the end, unfinished characters included."""
        return self._take(self._tokenizer.decode(self._window))

    def _take(self, text: str) -> str:
        piece = text[self._sent :]
        self._sent += len(piece)
        if piece and self._prompts_own:
            # Still broken: then it is the prompt's and no part of the answer.
            piece, self._prompts_own = piece.removeprefix(self._prompts_own), ""
        return piece

    def _slide(self, first: int, unsent: int) -> None:
        """Drop the tokens before ``first``; what follows stays as context, such as the tokens of the latest piece."""
        self._window = self._window[first:]
        self._clean = len(self._window)
        self._sent = max(0, len(self._tokenizer.decode(self._window)) - unsent)


def _context(tokenizer: Tokenizer, prompt: Sequence[int]) -> list[int]:
    """The prompt's last tokens, from the beginning of a character on.

    Where bytes are tokens, some decoders take a run of them as a whole: one that begins within a character would be
    nothing but unfinished characters, the answer's own included.
    """
    for count in range(_CONTEXT_TOKENS, min(len(prompt), _MOST_WINDOW_TOKENS) + 1):
        window = list(prompt[-count:])
        if not tokenizer.decode(window).startswith(UNFINISHED):
            return window
    return list(prompt[-_CONTEXT_TOKENS:])


def _certain(text: str) -> str:
    """The part that further tokens cannot change."""
    body = text.rstrip(UNFINISHED)
    unfinished = len(text) - len(body)
    if unfinished <= _MOST_UNFINISHED:
        return body
    return text[: len(text) - _STILL_OPEN]


class StopStrings:
    """Cuts the text before the first stop string, wherever the pieces are split."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.hit: str | None = None

    def push(self, piece: str) -> str:
        """What may be shown now. After a hit it is what came before the stop string, and then always nothing."""
        if self.hit is not None:
            return ""
        if not self._stops:
            return piece
        text = self._held + piece
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            # The one that is complete first, as if the text had come a character at a time; of several the longest.
            _, at, self.hit = min(found)
            self._held = ""
            return text[:at]
        keep = self._could_begin(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back, at the end of the answer."""
        held, self._held = self._held, ""
        return held

    def _could_begin(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        longest = min(len(text), max(len(stop) for stop in self._stops) - 1)
        for size in range(longest, 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0

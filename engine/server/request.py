"""An OpenAI request, checked and turned into what the engine generates."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rooftune.engine.server.fields import Fields, check_unsupported, messages, read_fields, text, token_ids
from rooftune.engine.server.limits import TOO_LONG_CODE, ApiError, Limits, bad_request
from rooftune.engine.step import MAX_SEED, Sampling
from rooftune.policies.errors import InputError


class Tokenizer(Protocol):
    """What the server needs of a tokenizer. Calls come from several threads."""

    @property
    def vocab_tokens(self) -> int:
        """Token ids are below this."""
        ...

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a text; special: with the tokens the model expects in front of a prompt. Must let other threads
        run meanwhile, because one of them runs the model."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the tokens, special ones left out; ``UNFINISHED`` where bytes are missing."""
        ...

    def chat_text(self, messages: Sequence[Mapping[str, str]]) -> str:
        """A conversation up to where the assistant speaks, special tokens in it. Raises InputError without a
        template."""
        ...


# This many characters nearly always hold at least one token; where they do not, more of the text is encoded.
_CHARS_A_TOKEN = 16
_SLACK_TOKENS = 64  # a cut text may end in other tokens than the whole one
_MORE_CHARS = 4


@dataclass(frozen=True, slots=True)
class Served:
    """What is served. max_model_tokens: prompt and answer together; model_id: the name clients use."""

    model_id: str
    max_model_tokens: int
    tokenizer: Tokenizer
    limits: Limits

    @property
    def max_prompt_tokens(self) -> int:
        room = self.max_model_tokens - 1  # at least one is to be generated
        return min(room, self.limits.prompt_tokens or room)


def read_prompt(body: Mapping[str, Any], *, chat: bool, served: Served) -> Sequence[int]:
    """At least one token id, within the limits. Raises ApiError 400. Encoding takes time: not for an event loop."""
    what = "messages" if chat else "prompt"
    most, tokenizer = served.max_prompt_tokens, served.tokenizer
    found: Sequence[int] | None
    if chat:
        written = _chat_text(body, tokenizer, most)
        found = None if written is None else encode_within(tokenizer, written, most, special=False)
    else:
        value = _one_prompt(body)
        if isinstance(value, list):
            found = token_ids(value, "prompt", tokenizer.vocab_tokens) if len(value) <= most else None
        else:
            found = encode_within(tokenizer, text(value, "prompt"), most, special=True)
    if found is None:
        message = (
            f"{what} has more than {most} tokens, the most that this server takes. This model's maximum context length "
            f"is {served.max_model_tokens} tokens, answer included; shorten it"
        )
        raise ApiError(400, message, code=TOO_LONG_CODE, param=what)
    if not found:
        raise bad_request("the prompt is empty, it needs at least 1 token", what)
    return found


def encode_within(tokenizer: Tokenizer, text: str, most_tokens: int, *, special: bool) -> list[int] | None:
    """Token ids, or None for more than ``most_tokens``, usually after encoding only the beginning.

    So a prompt of megabytes costs no more than the longest prompt that the server takes.
    """
    chars = _CHARS_A_TOKEN * (most_tokens + _SLACK_TOKENS)
    while chars < len(text):
        if len(tokenizer.encode(text[:chars], special=special)) > most_tokens + _SLACK_TOKENS:
            return None
        chars *= _MORE_CHARS
    found = tokenizer.encode(text, special=special)
    return found if len(found) <= most_tokens else None


def _one_prompt(body: Mapping[str, Any]) -> object:
    """A text or a list of token ids, alone or in a list."""
    value = body.get("prompt")
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise bad_request("prompt holds several prompts; send one request for each", "prompt")
        return value[0]
    return value


def _chat_text(body: Mapping[str, Any], tokenizer: Tokenizer, most_tokens: int) -> str | None:
    """None for more messages than tokens: no template makes less than one of each."""
    value = body.get("messages")
    if isinstance(value, list) and len(value) > most_tokens:
        return None
    conversation = messages(body)
    try:
        return tokenizer.chat_text(conversation)
    except InputError as error:
        raise bad_request(str(error), "messages") from None


DEFAULT_OUTPUT_TOKENS = 16  # of /v1/completions, as OpenAI has it; a chat may go on to the model's length


@dataclass(frozen=True, slots=True)
class Generation:
    """One answer to make. fields: as the client sent them; stop_token_ids: those it named."""

    chat: bool
    fields: Fields
    prompt: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    stop_token_ids: frozenset[int]

    @property
    def stops(self) -> Sequence[str]:
        stop = self.fields.stop
        return (stop,) if isinstance(stop, str) else stop


def read_generation(body: Mapping[str, Any], *, chat: bool, served: Served) -> Generation:
    """Raises ApiError 400 (404 for another model) naming the field. Encoding takes time: not for an event loop."""
    check_unsupported(body, chat=chat)
    fields = read_fields(body)
    if fields.model not in (None, served.model_id):
        message = f"model {str(fields.model)[:200]!r} is not served here; use {served.model_id!r}"
        raise ApiError(404, message, code="model_not_found", param="model")
    stop_token_ids = token_ids(fields.stop_token_ids, "stop_token_ids", served.tokenizer.vocab_tokens)
    seed = secrets.randbits(64) if fields.seed is None else fields.seed % (MAX_SEED + 1)
    prompt = tuple(read_prompt(body, chat=chat, served=served))
    return Generation(
        chat,
        fields,
        prompt,
        Sampling(fields.temperature, fields.top_p, seed),
        _max_tokens(fields.max_tokens or fields.max_completion_tokens, len(prompt), chat, served),
        frozenset(stop_token_ids),
    )


def _max_tokens(wanted: int | None, prompt_tokens: int, chat: bool, served: Served) -> int:
    room = served.max_model_tokens - prompt_tokens
    if wanted is not None and wanted > room:
        what = "messages" if chat else "prompt"
        message = (
            f"This model's maximum context length is {served.max_model_tokens} tokens, but {what} has {prompt_tokens} "
            f"and {wanted} are to be generated; shorten one of them"
        )
        raise ApiError(400, message, code=TOO_LONG_CODE, param=what)
    return wanted or (room if chat else min(room, DEFAULT_OUTPUT_TOKENS))

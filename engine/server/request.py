"""An OpenAI request, checked and turned into what the engine generates."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rooftune.engine.server.fields import (
    check_unsupported,
    flag,
    messages,
    number,
    stop_strings,
    text,
    token_ids,
    whole,
)
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
    vocab_tokens: int


def read_prompt(
    body: Mapping[str, Any], *, chat: bool, served: Served, tokenizer: Tokenizer, limits: Limits
) -> Sequence[int]:
    """At least one token id, within the limits. Raises ApiError 400. Encoding takes time: not for an event loop."""
    what = "messages" if chat else "prompt"
    most = served.max_model_tokens - 1  # at least one is to be generated
    if limits.prompt_tokens:
        most = min(most, limits.prompt_tokens)
    found: Sequence[int] | None
    if chat:
        written = _chat_text(body, tokenizer, most)
        found = None if written is None else encode_within(tokenizer, written, most, special=False)
    else:
        value = _one_prompt(body)
        if isinstance(value, list):
            found = token_ids(value, "prompt", served.vocab_tokens) if len(value) <= most else None
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
    asked = body.get("messages")
    if isinstance(asked, list) and len(asked) > most_tokens:
        return None
    conversation = messages(body)
    try:
        return tokenizer.chat_text(conversation)
    except InputError as error:
        raise bad_request(str(error), "messages") from None


DEFAULT_OUTPUT_TOKENS = 16  # of /v1/completions, as OpenAI has it; a chat may go on to the model's length


@dataclass(frozen=True, slots=True)
class Generation:
    """One answer to make. stop_token_ids: those the client named; with_tokens: token ids beside the text.

    include_usage: in a chunk of its own at the end of a stream; usage_as_it_grows: in every chunk before it as well.
    """

    chat: bool
    prompt: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    stops: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    stream: bool
    include_usage: bool
    usage_as_it_grows: bool
    with_tokens: bool


def read_generation(
    body: Mapping[str, Any], *, chat: bool, served: Served, tokenizer: Tokenizer, limits: Limits
) -> Generation:
    """Raises ApiError 400 (404 for another model) naming the field. Encoding takes time: not for an event loop."""
    check_unsupported(body, chat=chat)
    model = body.get("model")
    if model is not None and model != served.model_id:
        message = f"model {str(model)[:200]!r} is not served here; use {served.model_id!r}"
        raise ApiError(404, message, code="model_not_found", param="model")
    stop_ids = token_ids(body.get("stop_token_ids") or [], "stop_token_ids", served.vocab_tokens)
    if len(stop_ids) > 256:
        raise bad_request("stop_token_ids: at most 256", "stop_token_ids")
    stream = flag(body, "stream")
    sampling = _sampling(body)
    stops = stop_strings(body, limits)
    include_usage, usage_as_it_grows = _usage_wanted(body, stream)
    ignore_eos = flag(body, "ignore_eos")
    with_tokens = flag(body, "return_token_ids")
    asked = _asked_tokens(body)
    prompt = read_prompt(body, chat=chat, served=served, tokenizer=tokenizer, limits=limits)
    return Generation(
        chat=chat,
        prompt=tuple(prompt),
        sampling=sampling,
        max_tokens=_max_tokens(asked, len(prompt), chat, served),
        stops=stops,
        stop_token_ids=tuple(stop_ids),
        ignore_eos=ignore_eos,
        stream=stream,
        include_usage=include_usage,
        usage_as_it_grows=usage_as_it_grows,
        with_tokens=with_tokens,
    )


def _sampling(body: Mapping[str, Any]) -> Sampling:
    seed = whole(body, "seed", -(2**63), MAX_SEED)
    chosen = secrets.randbits(64) if seed is None else seed % (MAX_SEED + 1)
    try:
        return Sampling(number(body, "temperature", 1.0), number(body, "top_p", 1.0), chosen)
    except InputError as error:
        raise bad_request(str(error), "top_p" if str(error).startswith("top_p") else "temperature") from None


STREAM_OPTIONS = ("include_usage", "continuous_usage_stats")


def _usage_wanted(body: Mapping[str, Any], stream: bool) -> tuple[bool, bool]:
    """A chunk with usage at the end of a stream, and (vLLM's option) usage so far in every chunk."""
    options = body.get("stream_options")
    if options is None:
        return False, False
    if not stream or not isinstance(options, dict):
        raise bad_request("stream_options is an object, and only allowed with stream", "stream_options")
    if any(options[name] for name in options if name not in STREAM_OPTIONS):
        raise bad_request(f"stream_options: only {' and '.join(STREAM_OPTIONS)} are supported", "stream_options")
    include, growing = (flag(options, name) for name in STREAM_OPTIONS)
    return include, include and growing


def _asked_tokens(body: Mapping[str, Any]) -> int | None:
    both = [whole(body, name, 1, 10_000_000) for name in ("max_completion_tokens", "max_tokens")]
    asked = {value for value in both if value is not None}
    if len(asked) > 1:
        raise bad_request("max_tokens and max_completion_tokens differ; give one of them", "max_tokens")
    return asked.pop() if asked else None


def _max_tokens(asked: int | None, prompt_tokens: int, chat: bool, served: Served) -> int:
    room = served.max_model_tokens - prompt_tokens
    if asked is not None and asked > room:
        what = "messages" if chat else "prompt"
        message = (
            f"This model's maximum context length is {served.max_model_tokens} tokens, but {what} has {prompt_tokens} "
            f"and {asked} are to be generated; shorten one of them"
        )
        raise ApiError(400, message, code=TOO_LONG_CODE, param=what)
    return asked or (room if chat else min(room, DEFAULT_OUTPUT_TOKENS))

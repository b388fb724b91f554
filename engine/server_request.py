"""An OpenAI request, checked and turned into what the engine generates."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.server_errors import ApiError, bad_request
from engine.server_fields import check_unsupported, flag, messages, number, stop_strings, text, token_ids, whole
from engine.server_limits import Limits
from engine.server_text import Tokenizer
from engine.step import MAX_SEED, Sampling
from policies.errors import InputError

DEFAULT_OUTPUT_TOKENS = 16  # of /v1/completions, as OpenAI has it; a chat may go on to the model's length


@dataclass(frozen=True, slots=True)
class Served:
    """What is served. max_model_tokens: prompt and answer together; model_id: the name clients use."""

    model_id: str
    max_model_tokens: int
    vocab_tokens: int


@dataclass(frozen=True, slots=True)
class Generation:
    """One answer to make. stop_token_ids: those the client named; with_tokens: token ids beside the text."""

    chat: bool
    prompt: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    stops: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    stream: bool
    include_usage: bool
    with_tokens: bool


def read_generation(
    body: Mapping[str, Any], *, chat: bool, served: Served, tokenizer: Tokenizer, limits: Limits
) -> Generation:
    """Raises ApiError 400 (404 for another model) naming the field. Encoding takes time: not for an event loop."""
    check_unsupported(body)
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
    include_usage = _include_usage(body, stream)
    ignore_eos = flag(body, "ignore_eos")
    with_tokens = flag(body, "return_token_ids")
    asked = _asked_tokens(body, served)
    prompt = _chat_prompt(body, tokenizer) if chat else _prompt(body, tokenizer, served)
    return Generation(
        chat=chat,
        prompt=tuple(prompt),
        sampling=sampling,
        max_tokens=_max_tokens(asked, len(prompt), chat, served, limits),
        stops=stops,
        stop_token_ids=tuple(stop_ids),
        ignore_eos=ignore_eos,
        stream=stream,
        include_usage=include_usage,
        with_tokens=with_tokens,
    )


def _sampling(body: Mapping[str, Any]) -> Sampling:
    seed = whole(body, "seed", -(2**63), MAX_SEED)
    chosen = secrets.randbits(64) if seed is None else seed % (MAX_SEED + 1)
    try:
        return Sampling(number(body, "temperature", 1.0), number(body, "top_p", 1.0), chosen)
    except InputError as error:
        raise bad_request(str(error), "top_p" if str(error).startswith("top_p") else "temperature") from None


def _include_usage(body: Mapping[str, Any], stream: bool) -> bool:
    options = body.get("stream_options")
    if options is None:
        return False
    if not stream or not isinstance(options, dict):
        raise bad_request("stream_options is an object, and only allowed with stream", "stream_options")
    return flag(options, "include_usage")


def _asked_tokens(body: Mapping[str, Any], served: Served) -> int | None:
    both = [whole(body, name, 1, 10_000_000) for name in ("max_completion_tokens", "max_tokens")]
    asked = [value for value in both if value is not None]
    return asked[0] if asked else None


def _max_tokens(asked: int | None, prompt_tokens: int, chat: bool, served: Served, limits: Limits) -> int:
    if prompt_tokens < 1:
        raise bad_request("the prompt is empty, it needs at least 1 token", "prompt")
    what = "messages" if chat else "prompt"
    if limits.prompt_tokens and prompt_tokens > limits.prompt_tokens:
        message = f"{what} has {prompt_tokens} tokens, this server takes at most {limits.prompt_tokens}; shorten it"
        raise ApiError(400, message, code="context_length_exceeded", param=what)
    room = served.max_model_tokens - prompt_tokens
    wanted = asked or (room if chat else min(room, DEFAULT_OUTPUT_TOKENS))
    if room < 1 or wanted > room:
        message = (
            f"This model's maximum context length is {served.max_model_tokens} tokens, but {what} has {prompt_tokens} "
            f"and {asked or 1} are to be generated; shorten one of them"
        )
        raise ApiError(400, message, code="context_length_exceeded", param=what)
    return wanted


def _prompt(body: Mapping[str, Any], tokenizer: Tokenizer, served: Served) -> Sequence[int]:
    """A text, a list of token ids, or a list with one of either."""
    value = body.get("prompt")
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise bad_request("prompt holds several prompts; send one request for each", "prompt")
        value = value[0]
    if isinstance(value, list):
        return token_ids(value, "prompt", served.vocab_tokens)
    return tokenizer.encode(text(value, "prompt"))


def _chat_prompt(body: Mapping[str, Any], tokenizer: Tokenizer) -> Sequence[int]:
    conversation = messages(body)
    try:
        return tokenizer.render_chat(conversation)
    except InputError as error:
        raise bad_request(str(error), "messages") from None

"""An OpenAI request, checked and turned into what the engine generates."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rooftune.engine.server_errors import TOO_LONG_CODE, ApiError, bad_request
from rooftune.engine.server_fields import flag, number, stop_strings, token_ids, whole
from rooftune.engine.server_limits import Limits
from rooftune.engine.server_prompt import Served, read_prompt
from rooftune.engine.server_text import Tokenizer
from rooftune.engine.server_unsupported import check_unsupported
from rooftune.engine.step import MAX_SEED, Sampling
from rooftune.policies.errors import InputError

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

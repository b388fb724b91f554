"""Single fields of an OpenAI request: read with their kind and bound, or a 400 that names the field."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rooftune.engine.server.limits import Limits, bad_request


def whole(body: Mapping[str, Any], name: str, least: int, most: int) -> int | None:
    """A whole number within the bounds; None when absent or null."""
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise bad_request(f"{name} must be a whole number within {least}..{most}", name)
    return value


def number(body: Mapping[str, Any], name: str, default: float) -> float:
    """A finite number; its bounds are checked where it is used."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise bad_request(f"{name} must be a number", name)
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    if not math.isfinite(found):
        raise bad_request(f"{name} must be finite", name)
    return found


def flag(body: Mapping[str, Any], name: str) -> bool:
    """true or false; false when absent or null."""
    value = body.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise bad_request(f"{name} must be true or false", name)
    return value


def token_ids(value: object, name: str, vocab_tokens: int) -> list[int]:
    """A list of token ids that the model knows."""
    if not isinstance(value, list):
        raise bad_request(f"{name} must be a list of token ids", name)
    for token in value:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_tokens:
            raise bad_request(f"{name} must hold token ids within 0..{vocab_tokens - 1}", name)
    return value


def stop_strings(body: Mapping[str, Any], limits: Limits) -> tuple[str, ...]:
    """``stop``: a text or a list of texts, none of them empty."""
    value = body.get("stop")
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise bad_request("stop must be a text or a list of texts", "stop")
    if len(stops) > limits.stops or any(not 1 <= len(text(stop, "stop")) <= limits.stop_chars for stop in stops):
        raise bad_request(f"stop: at most {limits.stops} texts of 1..{limits.stop_chars} characters", "stop")
    return tuple(stops)


def text(value: object, name: str) -> str:
    """A text that has a UTF-8 form: JSON can carry half a surrogate pair, a tokenizer cannot."""
    if not isinstance(value, str):
        raise bad_request(f"{name} must be a text", name)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise bad_request(f"{name} holds half a surrogate pair, which UTF-8 cannot encode", name) from None
    return value


def messages(body: Mapping[str, Any]) -> Sequence[Mapping[str, str]]:
    """The conversation of a chat request, each content one text."""
    value = body.get("messages")
    if not isinstance(value, list) or not value:
        raise bad_request("messages must be a list with at least one message", "messages")
    return [_message(message, f"messages[{at}]") for at, message in enumerate(value)]


ROLES = ("system", "developer", "user", "assistant", "tool")


def _message(message: object, name: str) -> Mapping[str, str]:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise bad_request(f"{name} needs a role, one of {', '.join(ROLES)}", name)
    if message.get("tool_calls"):
        raise bad_request(f"{name}: tool calls are not supported by this server", name)
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            raise bad_request(f"{name}: only parts of type text are supported", name)
        content = "".join(text(part.get("text"), name) for part in content)
    return {"role": message["role"], "content": text(content, f"{name}.content")}


USED = frozenset(
    (
        "model", "max_tokens", "max_completion_tokens", "temperature", "top_p", "seed", "stop", "stop_token_ids",
        "ignore_eos", "stream", "stream_options", "return_token_ids",
    )
)  # fmt: skip
_PROMPT = {False: "prompt", True: "messages"}
# About the sender, the bill or the order of service, not about the answer.
NO_MATTER = frozenset(
    (
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "request_id", "session_id", "priority",
    )
)  # fmt: skip
# Values that request the default behaviour.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),  # and not 0, which requests the log probabilities of the chosen tokens
    "top_logprobs": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "top_k": (0, -1),
    "min_p": (0,),
    "min_tokens": (0,),
    "use_beam_search": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "return_tokens_as_token_ids": (False,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
}
# Of chats False is vLLM's default and what is done, for the template writes the special tokens.
_SPECIAL_TOKENS = "add_special_tokens"


def check_unsupported(body: Mapping[str, Any], *, chat: bool) -> None:
    """Raises ApiError 400 for an unknown field, and for a value of a known one that the server does not support."""
    for name, value in body.items():
        if value is None or name in USED or name in NO_MATTER or name == _PROMPT[chat]:
            continue
        neutral = (not chat,) if name == _SPECIAL_TOKENS else _NEUTRAL.get(name, ())
        if any(value == same and isinstance(value, bool) is isinstance(same, bool) for same in neutral):
            continue
        if name in ("n", "best_of"):
            raise bad_request(f"{name} must be 1: this server gives one answer to a request; send several", name)
        shown = ascii(name[:64])[1:-1]  # a name may be long, and no text at all
        raise bad_request(f"{shown} is not supported by this server; leave it out", shown)

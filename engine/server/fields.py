"""The fields of an OpenAI request: their kinds and bounds, and those that the server refuses or ignores."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from rooftune.engine.server.limits import bad_request
from rooftune.engine.step import MAX_SEED, MAX_TEMPERATURE
from rooftune.policies.errors import shown

_Count = Annotated[int, Field(ge=1, le=10_000_000)]
_Stop = Annotated[str, Field(min_length=1, max_length=1024)]


class StreamOptions(BaseModel):
    """include_usage: a chunk with usage at the end. continuous_usage_stats (vLLM's): usage so far in every chunk."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Fields(BaseModel):
    """What a request asks for beside its prompt; null counts as absent."""

    model_config = ConfigDict(strict=True, frozen=True)

    model: Any = None
    max_completion_tokens: _Count | None = None
    max_tokens: _Count | None = None
    temperature: Annotated[float, Field(ge=0.0, le=MAX_TEMPERATURE)] = 1.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    seed: Annotated[int, Field(ge=-(2**63), le=MAX_SEED)] | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=16)] = []
    stop_token_ids: Annotated[list[Any], Field(max_length=256)] = []
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False

    @field_validator("max_tokens")
    @classmethod
    def _one_length(cls, value: int | None, info: ValidationInfo) -> int | None:
        if info.data.get("max_completion_tokens") not in (None, value):
            raise ValueError("max_completion_tokens differs; give one of them")
        return value

    @field_validator("stream_options")
    @classmethod
    def _known_options(cls, value: StreamOptions, info: ValidationInfo) -> StreamOptions:
        if not info.data.get("stream"):
            raise ValueError("only allowed with stream")
        if any((value.model_extra or {}).values()):
            raise ValueError(f"only {' and '.join(StreamOptions.model_fields)} are supported")
        return value


def read_fields(body: Mapping[str, Any]) -> Fields:
    """Raises ApiError 400 that names the field."""
    try:
        return Fields.model_validate({name: value for name, value in body.items() if value is not None})
    except ValidationError as error:
        # The deepest of the first field: of a text or a list of texts it is the one that fits best.
        found = error.errors(include_url=False, include_context=False)
        first = max((one for one in found if one["loc"][0] == found[0]["loc"][0]), key=lambda one: len(one["loc"]))
        known = Fields.model_fields | StreamOptions.model_fields
        name = next(str(part) for part in reversed(first["loc"]) if part in known)
        message = first["msg"].removeprefix("Value error, ")
        value = first["input"]
        long = isinstance(value, str | list | dict) and len(value) > 100  # writing megabytes would hold up every stream
        given = "" if long else f" is {shown(value)}"
        raise bad_request(f"{name}{given}: {message}", name) from None


def token_ids(value: object, name: str, vocab_tokens: int) -> list[int]:
    """A list of token ids that the model knows."""
    if not isinstance(value, list):
        raise bad_request(f"{name} must be a list of token ids", name)
    for token in value:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_tokens:
            raise bad_request(f"{name} must hold token ids within 0..{vocab_tokens - 1}", name)
    return value


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
        if value is None or name in Fields.model_fields or name in NO_MATTER or name == _PROMPT[chat]:
            continue
        neutral = (not chat,) if name == _SPECIAL_TOKENS else _NEUTRAL.get(name, ())
        if any(value == same and isinstance(value, bool) is isinstance(same, bool) for same in neutral):
            continue
        if name in ("n", "best_of"):
            raise bad_request(f"{name} must be 1: this server gives one answer to a request; send several", name)
        shown = ascii(name[:64])[1:-1]  # a name may be long, and no text at all
        raise bad_request(f"{shown} is not supported by this server; leave it out", shown)

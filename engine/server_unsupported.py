"""What a request may not ask for: fields of OpenAI's and vLLM's interfaces that are not offered, and unknown ones.

A field that is passed over in silence gives an answer that its sender takes for another one. So everything is refused
that is not used here, says nothing (null), changes nothing, or is no matter of the answer.
"""

from collections.abc import Mapping
from typing import Any

from rooftune.engine.server_errors import bad_request

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
# Values that ask for what is done anyway.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),  # and not 0, which asks for the logarithms of the chosen tokens
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
    """Raises ApiError 400 for a field that asks for what is not offered, or that is not known."""
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

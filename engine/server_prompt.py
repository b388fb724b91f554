"""The prompt of a request as token ids: read, encoded no further than it can fit, or a 400 that says by how much."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rooftune.engine.server_errors import TOO_LONG_CODE, ApiError, bad_request
from rooftune.engine.server_fields import messages, text, token_ids
from rooftune.engine.server_limits import Limits
from rooftune.engine.server_text import Tokenizer
from rooftune.policies.errors import InputError

# So many characters hold one token at least, nearly always; where they do not, more of the text is looked at.
_CHARS_A_TOKEN = 16
_SLACK_TOKENS = 64  # a text that was cut may end in other tokens than the whole one
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
    """Token ids, or None for more than ``most_tokens``; then seldom more than the beginning has been encoded.

    Whoever sends megabytes costs no more than the longest prompt that could be served.
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

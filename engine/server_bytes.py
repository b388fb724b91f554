"""The tokenizer of an engine without a model: one token a byte of UTF-8."""

from collections.abc import Mapping, Sequence


class ByteTokenizer:
    """Tokens 0..255 are bytes; above that every token is a space and its number, for engines that make up tokens."""

    def __init__(self, vocab_tokens: int) -> None:
        self.vocab_tokens = vocab_tokens

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        parts = (bytes((token,)) if token < 256 else b" %d" % token for token in token_ids)
        return b"".join(parts).decode("utf-8", "replace")

    def chat_text(self, messages: Sequence[Mapping[str, str]]) -> str:
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return "".join([*lines, "assistant: "])

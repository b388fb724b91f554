"""What the fake runner must answer, worked out without a schedule or a store."""

from collections.abc import Sequence

from rooftune.engine.fake import VOCAB_TOKENS, _mixed, _spoken


def expected_tokens(prompt: Sequence[int], count: int, seed: int = 0, vocab_tokens: int = VOCAB_TOKENS) -> list[int]:
    """The ``count`` tokens that follow a prompt, whatever the schedule."""
    content, tokens = 0, []
    for token_id in prompt:
        content = _mixed(content, token_id)
    for _ in range(count):
        tokens.append(_spoken(content, seed, vocab_tokens))
        content = _mixed(content, tokens[-1])
    return tokens

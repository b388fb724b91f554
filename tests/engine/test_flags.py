"""``--kv-blocks`` takes auto or a count within its bound."""

import pytest

from rooftune.engine.server.flags import parse_kv_blocks
from rooftune.policies.errors import InputError


@pytest.mark.parametrize(("text", "blocks"), [("auto", None), ("1", 1), ("007", 7), ("1000000000", 10**9)])
def test_kv_blocks_within_the_bound(text: str, blocks: int | None) -> None:
    assert parse_kv_blocks(text, "--kv-blocks") == blocks


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "1.5", "many", "1000000001", "0000000005000000000", "9" * 5000, "\N{SUPERSCRIPT TWO}"]
)
def test_kv_blocks_beyond_the_bound(text: str) -> None:
    with pytest.raises(InputError, match=r"--kv-blocks is .*, must be auto or a whole number within 1\.\.1000000000"):
        parse_kv_blocks(text, "--kv-blocks")

"""The sliced product with the vocabulary is the product with the vocabulary."""

from collections.abc import Iterator

import pytest

pytestmark = pytest.mark.engine
pytest.importorskip("torch", reason="needs torch (make engine-env)")

import torch  # noqa: E402 - after the check for torch, as all below
from torch import nn  # noqa: E402

from rooftune.engine.torch.linear import SLICE_TOKENS, SlicedHead  # noqa: E402


@pytest.fixture(autouse=True, params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("vocabulary", [2 * SLICE_TOKENS + 1, 4 * SLICE_TOKENS, 5 * SLICE_TOKENS - 7])
@pytest.mark.parametrize("rows", [1, 2, 33])
def test_the_same_logits(vocabulary: int, rows: int) -> None:
    torch.manual_seed(vocabulary + rows)
    head, hidden = nn.Linear(96, vocabulary, bias=False), torch.randn(rows, 96)
    assert SlicedHead.can_take(head)
    with torch.inference_mode():
        ours, theirs = SlicedHead(head)(hidden), head(hidden)
    assert ours.shape == theirs.shape
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert torch.equal(ours.argmax(dim=-1), theirs.argmax(dim=-1))


def test_the_sliced_head_is_used_only_where_it_matches(threads: int) -> None:
    tokens = threads * SLICE_TOKENS + 1
    assert not SlicedHead.can_take(nn.Linear(8, tokens))  # a bias
    assert not SlicedHead.can_take(nn.Linear(8, tokens, bias=False).to(torch.bfloat16))
    assert not SlicedHead.can_take(nn.Linear(8, tokens - 1, bias=False))
    assert not SlicedHead.can_take(nn.Sequential(nn.Linear(8, tokens, bias=False)))

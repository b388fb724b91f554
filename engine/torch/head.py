"""The product with the vocabulary, a slice of the vocabulary at a time."""

import torch
from torch import nn

# Tokens of a slice for each thread: few enough that the weights, which the product lays out anew in every call, stay in
# its cache.
SLICE_TOKENS = 2048


class SlicedHead:
    """Does what a float32 ``nn.Linear`` without bias does on a CPU, with the same weight.

    For the few rows that a step samples, the product with a whole vocabulary takes longer than those with its slices
    (``rooftune bench engine-overhead`` prints both): no slice leaves the cache before it is multiplied.

    whole: that module.
    """

    def __init__(self, linear: nn.Linear) -> None:
        self.whole = linear
        weight, step = linear.weight.detach(), _slice_tokens()
        self._tokens = len(weight)
        begins = range(0, self._tokens, step)
        self._slices = [(slice(begin, begin + step), weight[begin : begin + step].t()) for begin in begins]

    @staticmethod
    def can_take(head: nn.Module) -> bool:
        """Whether it does the same as this module, and there is more than one slice."""
        return (
            type(head) is nn.Linear
            and head.bias is None
            and head.weight.dtype == torch.float32
            and head.weight.device.type == "cpu"
            and len(head.weight) > _slice_tokens()
        )

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """(rows, hidden) -> (rows, vocabulary)."""
        if len(hidden) == 1:  # no matrix: nothing is laid out
            whole: torch.Tensor = self.whole(hidden)
            return whole
        logits = hidden.new_empty(len(hidden), self._tokens)
        for columns, weight in self._slices:
            torch.mm(hidden, weight, out=logits[:, columns])
        return logits


def _slice_tokens() -> int:
    threads: int = torch.get_num_threads()
    return SLICE_TOKENS * threads

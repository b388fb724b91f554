"""Linear layers whose weights lie as oneDNN's bfloat16 kernels want them, for models on a CPU.

torch hands oneDNN a weight as it was stored, and oneDNN walks or reorders it again in every call: for the few rows
of a decode step that costs about as much as the product itself. Reordered once, at load, the same kernels give the
same product (up to rounding, since they add in another order). Only bfloat16: in float32 our tokens must equal those of
``generate``, which come from torch's own order of sums.
"""

import torch
from torch import nn

# Rows that the layout is chosen for; measured, other counts run as fast on it as on their own.
_ROWS = 32


class PackedLinear(nn.Module):
    """In place of an ``nn.Linear``. Its weight is a buffer in oneDNN's layout, which no one else can read."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("packed", torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _ROWS))
        self.bias = linear.bias

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(..., in) -> (..., out)."""
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(hidden, self.packed, self.bias, "none", [], "")
        return product


def can_pack(model: nn.Module) -> bool:
    """Whether this torch and this CPU have the needed operations (those that torch's own compiler uses)."""
    weight = next(model.parameters())
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def pack_linears(model: nn.Module) -> int:
    """Replace every linear layer, one at a time, so that only one weight is held twice; returns how many.

    A head that shares its weight with the embedding gets a copy of its own.
    """
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
    ]
    count = len(found)
    while found:
        parent, name, child = found.pop()
        setattr(parent, name, PackedLinear(child))
    return count


# Tokens of a slice for each thread: few enough that the weights, which every call lays out again, stay in
# its cache.
SLICE_TOKENS = 2048


class SlicedHead:
    """Replaces a float32 ``nn.Linear`` without bias on a CPU, with the same weight.

    For the few rows that a step samples, the product with a whole vocabulary takes longer than those with its slices
    (``rooftune bench engine-overhead`` prints both): no slice leaves the cache before it is multiplied.

    whole: the module it replaces.
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

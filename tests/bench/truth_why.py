"""Bench ``why``: the figures behind decisions 010, 011 and 012 that the other benches do not print.

The errors without each mechanism, the error of each form of the step model, the effect of a machine's drift.
"""

from collections.abc import Iterator

from rooftune.policies.commands import Figure
from tests.bench.shared_data import need_shared_data
from tests.bench.truth_why_rtx4090 import why_rtx4090
from tests.bench.truth_why_speed import why_speed
from tests.bench.truth_why_sweep import why_sweep


def bench(short: bool) -> Iterator[Figure]:
    """All of it; short: the RTX 4090's part only, which takes seconds."""
    need_shared_data()
    yield from why_rtx4090()
    if not short:
        yield from why_sweep()
        yield from why_speed()

"""The installed vLLM's scheduler and ``plan_step``, step for step, on random workloads."""

from collections import Counter
from pathlib import Path

import pytest

from tests.twin import our_scheduler, recorded
from tests.twin.compare import Record, Workload, coverage, first_difference, summary
from tests.twin.workloads import make_workloads

pytestmark = pytest.mark.vllm

WORKLOADS = 1500
LEAST_SHARE = 0.05
NAMES = {
    "prompt in chunks",
    "budget cuts a chunk",
    "chunk cap binds",
    "adaptive chunk cap binds",
    "lone request past the chunk cap",
    "preemption",
    "resumed after preemption",
    "resumed after preemption with a prefix hit",
    "recomputation of produced tokens",
    "sequence cap holds back",
    "active cap holds back",
    "KV blocks hold back",
    "chunking on",
    "chunking off",
    "chunking off: whole prompt or KV blocks hold back",
    "whole-prompt reservation on",
    "whole-prompt reservation off",
    "prefix caching on",
    "prefix caching off",
    "prefix hit",
    "prefix hit on blocks of the same step",
    "prefix hit on produced tokens",
    "last block of a full hit computed again",
    "two cached blocks of one content",
    "eviction of cached blocks",
    "running request unserved: budget spent",
    "decode unserved",
    "knobs change in mid-run",
    "output of one token",
    "prompt ends on a block boundary",
}


@pytest.fixture(scope="module")
def pairs(vllm_python: Path) -> list[tuple[Workload, Record]]:
    """Fresh workloads and what the installed vLLM decides on them."""
    workloads = list(make_workloads(WORKLOADS, first_seed=100_000))
    return list(zip(workloads, recorded.ask_vllm(vllm_python, workloads), strict=True))


def test_identical_on_every_workload(pairs: list[tuple[Workload, Record]]) -> None:
    found = (first_difference(workload, record, our_scheduler.drive(workload)) for workload, record in pairs)
    differences = [difference for difference in found if difference is not None]
    report = summary(differences, len(pairs))
    print(report)
    assert not differences, "\n".join([report, *map(str, differences[:5])])


def test_workloads_exercise_every_rule(pairs: list[tuple[Workload, Record]]) -> None:
    counts = Counter(name for workload, record in pairs for name in coverage(workload, record))
    print("\n".join(f"{count / len(pairs):6.1%} {name}" for name, count in counts.most_common()))
    assert set(counts) == NAMES
    assert not {name: count / len(pairs) for name, count in counts.items() if count / len(pairs) < LEAST_SHARE}
    # Most workloads run to their end; the others are compared up to their bound.
    assert sum(record["done"] for _, record in pairs) / len(pairs) > 0.8


def test_the_recorded_file_is_what_this_vllm_decides(vllm_python: Path) -> None:
    kept = recorded.load()
    fresh = recorded.ask_vllm(vllm_python, [workload for workload, _ in kept])
    assert fresh == [record for _, record in kept]

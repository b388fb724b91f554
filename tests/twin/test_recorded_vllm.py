"""``plan_step`` against decisions of vLLM 0.32.0 that are kept in a file; needs no vLLM."""

import copy
import json

import pytest

from tests.twin import our_scheduler, recorded
from tests.twin.compare import PARTS, Record, Workload, coverage, first_difference
from tests.twin.workloads import make_workload, make_workloads

PAIRS = recorded.load()


@pytest.mark.parametrize(("workload", "record"), PAIRS, ids=[str(workload["seed"]) for workload, _ in PAIRS])
def test_plan_step_decides_what_vllm_decided(workload: Workload, record: Record) -> None:
    difference = first_difference(workload, record, our_scheduler.drive(workload))
    assert difference is None, str(difference)


def test_the_file_covers_preemption_caps_and_prefix_hits() -> None:
    seen = [coverage(workload, record) for workload, record in PAIRS]
    for name in (
        "preemption",
        "chunk cap binds",
        "adaptive chunk cap binds",
        "lone request past the chunk cap",
        "sequence cap holds back",
        "active cap holds back",
        "KV blocks hold back",
        "chunking off: whole prompt or KV blocks hold back",
        "prefix hit on blocks of the same step",
        "prefix hit on produced tokens",
        "two cached blocks of one content",
        "eviction of cached blocks",
        "decode unserved",
    ):
        assert sum(name in names for names in seen) >= recorded.TIMES_COVERED, name


@pytest.mark.parametrize("part", range(len(PARTS)))
def test_a_changed_decision_is_detected(part: int) -> None:
    workload, record = PAIRS[0]
    changed = copy.deepcopy(record)
    step = len(changed["steps"]) // 2
    changed["steps"][step][part] = -1
    difference = first_difference(workload, record, changed)
    assert difference is not None
    assert (difference.step, difference.part) == (step, PARTS[part])
    assert str(workload["seed"]) in str(difference)


def test_a_missing_step_is_detected() -> None:
    workload, record = PAIRS[0]
    shorter = {**record, "steps": record["steps"][:-1]}
    difference = first_difference(workload, record, shorter)
    assert difference is not None
    assert difference.part == "length"


def test_a_seed_makes_the_same_workload_again() -> None:
    assert json.dumps(make_workload(7)) == json.dumps(make_workload(7))
    assert json.dumps(make_workload(7)) != json.dumps(make_workload(8))


def test_content_ids_name_whole_prefixes() -> None:
    for workload in make_workloads(50):
        before: dict[int, int] = {}
        for request in workload["requests"]:
            content = request["content"]
            assert len(content) == request["prompt_tokens"] // workload["engine"]["block_size"]
            for previous, this in zip([-1, *content], content, strict=False):
                assert before.setdefault(this, previous) == previous


def test_every_request_of_a_workload_fits_its_pool_and_its_model() -> None:
    for workload in make_workloads(200):
        engine = workload["engine"]
        for request in workload["requests"]:
            tokens = request["prompt_tokens"] + request["output_tokens"]
            assert tokens - 1 <= (engine["num_blocks"] - 1) * engine["block_size"]
            assert tokens < engine["max_model_tokens"]
        for knobs in (engine, *workload["changes"]):
            assert 1 <= knobs["step_tokens"] <= engine["ceiling_tokens"]

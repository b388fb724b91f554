"""A replay begun in mid-run goes on to the instant like the run that was not cut."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from rooftune.policies.errors import InputError
from rooftune.policies.request import Boot, IntArray, Setting
from rooftune.policies.step_time import NAMED_MODELS
from rooftune.tuner.sim.engine import Engine
from rooftune.tuner.sim.progress import Progress
from rooftune.tuner.sim.result import RunResult
from rooftune.tuner.sim.twin import Ends, simulate
from rooftune.tuner.traffic.workload import Traffic
from tests.twin.random_runs import Run, make_run, picker, runs
from tests.twin.walk import walk

INSTANTS = ("scheduled_s", "first_token_s", "finish_s", "longest_gap_s")


def only(traffic: Traffic, rows: IntArray) -> Traffic:
    columns = ("arrival_s", "prompt_tokens", "output_tokens", "cached_tokens", "tenant")
    return Traffic(**{name: getattr(traffic, name)[rows] for name in columns})


def counted(run: Run) -> Run:
    """The run in an engine that only counts KV blocks."""
    return replace(run, engine=replace(run.engine, boot=run.engine.boot._replace(contents=0)))


def cut(traffic: Traffic, left: Progress, seen_s: float) -> tuple[IntArray, Progress]:
    """Rows that are in the engine or still to come, and the progress in terms of them."""
    to_come = np.flatnonzero(traffic.arrival_s > seen_s)
    rows = np.sort(np.concatenate([left.request, to_come]))
    return rows, replace(left, request=np.searchsorted(rows, left.request))


def assert_goes_on(whole: RunResult, begun: RunResult, rows: IntArray) -> None:
    for name in INSTANTS:
        expected = getattr(whole.outcomes, name)[rows]
        assert np.array_equal(getattr(begun.outcomes, name), expected, equal_nan=True), name
    assert np.array_equal(begun.outcomes.failed, whole.outcomes.failed[rows])


@pytest.mark.parametrize("skip", [True, False])
def test_begun_in_mid_run_equals_the_run_through(skip: bool) -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=150, deadline=None)
    @given(runs(), st.floats(0.02, 0.98))
    def goes_on(random: Run, share: float) -> None:
        run = counted(random)
        arguments = (run.engine, run.setting, run.model)
        whole = simulate(run.traffic, *arguments, changes=run.changes, skip=skip)
        assume(whole.steps > 1)
        head = simulate(
            run.traffic,
            *arguments,
            changes=run.changes,
            skip=skip,
            ends=Ends(most_steps=max(1, int(share * whole.steps))),
        )
        left = head.left
        assert left.seen_s is not None
        rows, progress = cut(run.traffic, left, left.seen_s)
        assume(len(rows) > 0)
        traffic = only(run.traffic, rows)
        begun = simulate(traffic, *arguments, changes=run.changes, skip=skip, progress=progress)
        assert_goes_on(whole, begun, rows)
        assert head.steps + begun.steps == whole.steps
        assert head.preempted + begun.preempted == whole.preempted
        slow = walk(traffic, *arguments, changes=run.changes, progress=progress)
        for name in INSTANTS:
            np.testing.assert_allclose(
                getattr(slow.outcomes, name), getattr(begun.outcomes, name), rtol=1e-9, atol=1e-12, err_msg=name
            )
        facts = {
            "running at the cut": left.running > 0,
            "waiting at the cut": left.running < len(left),
            "prefill under way": bool(np.any((left.computed_tokens > 0) & (left.produced_tokens == 0))),
            "preempted and waiting": bool(np.any(left.produced_tokens[left.running :] > 0)),
            "preempted after the cut": begun.preempted > 0,
            "planned ahead": run.engine.boot.plan_ahead == 1,
            "chunk cap": run.setting.chunk_cap_tokens > 0,
            **{f"order {order}": run.setting.order_policy == order for order in range(3)},
            **{f"budget policy {policy}": run.setting.budget_policy == policy for policy in range(3)},
        }
        for fact, holds in facts.items():
            if holds:
                event(fact)
                seen[fact] += 1

    goes_on()
    rare = {"preempted and waiting": 1, "preempted after the cut": 1}
    wanted = ["running at the cut", "waiting at the cut", "prefill under way", "planned ahead", "chunk cap"]
    wanted += [f"{kind} {number}" for kind in ("order", "budget policy") for number in range(3)]
    missing = [fact for fact in (*wanted, *rare) if seen[fact] < rare.get(fact, 5)]
    assert not missing, (missing, seen)


def begun_run() -> tuple[Run, Progress]:
    run = counted(make_run(picker(1), 8, 0, False))
    return run, simulate(run.traffic, run.engine, run.setting, run.model, ends=Ends(most_steps=3)).left


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"at_s": -1.0}, "start of the replay is -1"),
        ({"at_s": float("nan")}, "start of the replay is nan"),
        ({"request": np.array([7])}, "first rows of the traffic"),
        ({"running": 2}, "within 0..1"),
        ({"produced_tokens": np.array([10_000])}, "more than its output"),
        ({"computed_tokens": np.array([10_000])}, "computed all its tokens"),
        ({"produced_tokens": np.array([1]), "last_token_s": np.array([np.nan])}, "no instant of its last one"),
    ],
)
def test_progress_that_cannot_have_been_made_is_refused(wrong: dict[str, object], says: str) -> None:
    run, _ = begun_run()
    zero, none = np.zeros(1, dtype=np.int64), np.full(1, np.nan)
    good = Progress(float(run.traffic.arrival_s[0]), zero, 0, zero, zero, none, none, none, none)
    arguments = (run.traffic, run.engine, run.setting, run.model)
    simulate(*arguments, progress=good)
    with pytest.raises(InputError, match=says):
        simulate(*arguments, progress=replace(good, **wrong))  # type: ignore[arg-type]  # fields of Progress


def test_a_pool_that_knows_contents_is_refused() -> None:
    run, progress = begun_run()
    knowing = replace(run.engine, boot=run.engine.boot._replace(contents=1))
    with pytest.raises(InputError, match="contents to 0"):
        simulate(run.traffic, knowing, run.setting, run.model, progress=progress)


def test_what_finds_no_room_in_the_engine_waits() -> None:
    """A pool or a place less than what ran: the newest wait, and all finish."""
    traffic = Traffic(np.zeros(3), np.array([40, 40, 40]), np.array([9, 9, 9]), *np.zeros((2, 3), dtype=np.int64))
    model, boot, rows = NAMED_MODELS["8b-2tbs"], Boot(64, 16, 1, 1, 0, 1), np.arange(3)
    halfway = Progress(1.0, rows, 3, np.full(3, 41), np.full(3, 2), *np.full((3, 3), 0.5), np.zeros(3))
    roomy = simulate(traffic, Engine(boot, 100, 8), Setting(64, max_running=3), model, progress=halfway)
    for engine in (Engine(boot, 8, 8), Engine(boot, 100, 2)):
        tight = simulate(traffic, engine, Setting(64, max_running=2), model, progress=halfway)
        assert not tight.outcomes.failed.any() and tight.refused == 0
        assert tight.outcomes.finish_s[2] > roomy.outcomes.finish_s[2]

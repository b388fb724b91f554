"""Cases A of docs/cases.md, as the loop meets them: an engine's records in, action and reason out."""

from dataclasses import replace
from typing import Any

import pytest

from rooftune.engine.protocol import InForce
from rooftune.policies import wire
from rooftune.policies.guard import Action, Reason
from rooftune.policies.request import Setting
from rooftune.policies.slo import Slo, Target
from rooftune.policies.step_time import StepModel
from rooftune.tuner.control.job import Job, SearchAnswer
from rooftune.tuner.control.memory import Memory, knobs_of, traffic_of
from rooftune.tuner.control.outcome import CycleRecord
from rooftune.tuner.control.signals.codes import Signal
from tests.control.doubles import BOLD, MemoryStore, Reply, Rig, answer_of, options, proposes, rig
from tests.control.live import BOOT, SLOW, LiveEngine, Traffic
from tests.control.test_loop_pure import tried
from tests.control.twin_searcher import twin_rig

LONG = {"max_queue": 300, "prefix_caching": False}


def pushed(record: CycleRecord) -> bool:
    return record.action is Action.PUSH


def codes(record: CycleRecord) -> set[str]:
    return {part.code for part in record.signals}


# --- 1 -----------------------------------------------------------------------------------------


def without_cap(engine: LiveEngine) -> None:
    """An engine that has no chunk cap to move: the state says so."""
    honest = engine.running.tuning_state

    def state() -> Any:
        seen = honest()
        gone = [
            k.model_copy(update=dict.fromkeys(("value", "boot", "min", "max")) | {"mode": "absent"}) for k in seen.knobs
        ]
        knobs = tuple(new if old.name == "chunk_cap_tokens" else old for old, new in zip(seen.knobs, gone, strict=True))
        return seen.model_copy(update={"knobs": knobs})

    engine.running.tuning_state = state  # type: ignore[method-assign]  # another engine's answer


def test_case_1_a_knob_that_the_engine_lacks_is_never_searched_nor_pushed() -> None:
    engine = LiveEngine()
    without_cap(engine)
    run = rig(proposes(chunk_cap_tokens=256), engine=engine, options=options(search_requests=20))
    run.run(4)
    assert set(run.searcher.jobs[0].bounds) == {"step_tokens"}
    assert run.records[-1].reason is Reason.WORKER_FAILED and not run.port.moving


@pytest.mark.slow
def test_case_1_short_requests_behind_long_prompts_are_helped_by_the_cap() -> None:
    """TTFT is missed, gaps are fine, one long prompt is in flight at a time: the budget alone, upward, is no answer."""
    slo = Slo((Target("ttft", 1.5, 0.99), Target("longest_gap", 0.9, 0.99)))
    traffic = Traffic(rate_rps=2.0, documents=20, document_tokens=40_000, output_tokens=10)
    engine = LiveEngine(traffic, model=SLOW, kv_blocks=40_000, model_tokens=100_000)
    run = twin_rig(engine=engine, options=options(slo=slo, search_requests=60, window_s=300.0, trials=40))
    run.run(25, until=pushed)
    push = run.records[-1]
    assert push.observed is not None and isinstance(push.observed.ttft_p95_s, float)
    assert push.observed.ttft_p95_s > 1.5
    assert push.pushed is not None and "chunk_cap_tokens" in push.pushed
    assert push.pushed.get("step_tokens", 2048) <= 2048 or push.pushed["chunk_cap_tokens"] > 0


# --- 3 -----------------------------------------------------------------------------------------


def test_case_3_a_push_that_admits_no_request_is_worse_despite_short_gaps() -> None:
    """The only target is on gaps, and of the requests that end under the push every one meets it."""
    given = options(
        search_requests=200, slo=Slo((Target("longest_gap", 0.3, 0.99),)), bounds={"max_running": (1.0, 32.0)}
    )
    run = rig(proposes(max_running=1), options=given)
    run.run(24, until=lambda record: record.action is Action.REVERT)
    push = next(record for record in run.records if pushed(record))
    seen = next(record.observed for record in run.records if record.number > push.number)
    assert seen is not None and seen.attainment == 1.0
    revert = run.records[-1]
    assert (revert.action, revert.reason) == (Action.REVERT, Reason.HARMFUL) and revert.number <= push.number + 4
    assert run.setting == BOOT


def test_case_3_falling_throughput_under_a_long_prompt_is_not_healthy() -> None:
    """Finished requests were served well; running ones finish, no new ones start, and the queue grows."""
    traffic = Traffic(rate_rps=2.0, documents=0, output_tokens=40)
    engine = LiveEngine(traffic, boot=BOOT._replace(step_tokens=256), kv_blocks=20_000, model_tokens=200_000)
    engine.options["ceiling_tokens"] = 2048
    engine.start()
    run = rig(proposes(step_tokens=2048, chunk_cap_tokens=64, gain=0.3), engine=engine, options=options(window_s=300.0))
    run.run(5)
    assert run.records[-1].reason is Reason.NO_TARGETS_MISSED
    engine.submit(130_000, 10)
    run.run(6, until=pushed)
    seen = run.records[-1].observed
    assert seen is not None and seen.attainment is not None and seen.attainment > 0.97, "the finished ones look fine"
    assert Signal.LONG_PREFILL_BLOCKS.value in codes(run.records[-1])
    assert pushed(run.records[-1]) and run.records[-1].pushed is not None
    assert run.records[-1].pushed["step_tokens"] > 256


# --- 5 -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_case_5_a_cap_without_effect_is_dropped_from_the_search() -> None:
    engine = LiveEngine()
    desk = engine.running.desk
    honest = desk.begin_step

    def ignoring(now_s: float) -> InForce:
        force = honest(now_s)
        return force._replace(setting=force.setting._replace(chunk_cap_tokens=0))

    desk.begin_step = ignoring  # type: ignore[method-assign]  # a scheduler that accepts the cap and does not follow it
    caps = iter([256, 512, 128, 64, 32])
    limits = replace(BOLD, max_inconclusive_s=400.0)
    run = rig(
        lambda job: (
            answer_of(job, chunk_cap_tokens=next(caps), gain=0.4)
            if "chunk_cap_tokens" in job.bounds
            else answer_of(job, verdict="keep")
        ),
        engine=engine,
        options=options(limits=limits, search_requests=20, search_every_s=30.0),
    )
    run.run(140, until=lambda r: "no effect" in r.detail)
    reverts = [r for r in run.records if r.action is Action.REVERT]
    assert [r.reason for r in reverts] == [Reason.INCONCLUSIVE_TOO_LONG] * 2
    assert "no effect seen of chunk_cap_tokens" in run.records[-1].detail
    assert set(run.searcher.jobs[-1].bounds) == {"step_tokens"}
    run.run(3, until=lambda r: r.reason is Reason.NULL_RESULT)
    assert run.records[-1].reason is Reason.NULL_RESULT, "and it stops climbing"


# --- 6 -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_case_6_live_results_are_reported_as_measured_not_made_monotone() -> None:
    """Four limits, tails 3.6, 4.1, 6.3, 4.0 s: the search gets every one, with its own knob and share."""
    shares = {1: 0.96, 4: 0.90, 8: 0.965}
    given = options(search_requests=20, bounds={"max_partial_prefills": (0.0, 8.0)})
    first = rig(proposes(verdict="keep"), options=given)
    first.run(3)
    traffic = traffic_of(first.controller._observer._before.requests, 30.0)  # type: ignore[union-attr]  # it has looked
    assert traffic is not None
    trials = tuple(
        tried(
            "worse",
            traffic,
            before=knobs_of(BOOT),
            setting=knobs_of(BOOT._replace(max_partial_prefills=limit)),
            attainment=share,
        )
        for limit, share in shares.items()
    )
    for limit in shares:
        store = MemoryStore()
        store.values["loop"] = Memory(tried=trials).model_dump_json()
        run = rig(proposes(max_partial_prefills=limit), options=given, store=store)
        run.run(5)
        assert {one.setting.max_partial_prefills: one.attainment for one in run.searcher.jobs[0].live} == shares
        assert run.records[-1].reason is Reason.NULL_RESULT and not run.port.moving, "no limit at all was best"


# --- 7 -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_case_7_lessons_of_one_load_do_not_apply_under_another() -> None:
    """First a small budget is better, then, under another load, the large one: there is no sign that always holds."""

    def reply(job: Job) -> SearchAnswer:
        long = sum(job.window.prompt_tokens) / len(job.window.prompt_tokens) > 2000
        return answer_of(job, step_tokens=2048 if long else 128, gain=0.3)

    slo = Slo((Target("ttft", 3.0, 0.99), Target("longest_gap", 0.1, 0.99)))
    run = rig(reply, options=options(slo=slo, search_requests=20, search_every_s=40.0))
    run.run(14, until=pushed)
    run.run_trial()
    assert run.setting.step_tokens == 128
    run.engine.carry(Traffic(rate_rps=0.8, prompt_tokens=4000, output_tokens=2, documents=0))
    jobs_before = len(run.searcher.jobs)
    run.run(40, until=lambda r: r.action is Action.PUSH)
    assert run.setting.step_tokens == 2048
    later = run.searcher.jobs[jobs_before:]
    assert later and later[-1].live == (), "the trial under the other load is not passed on"
    run.run_trial()
    assert run.records[-1].verify is not None and run.records[-1].verify.verdict == "better"
    assert run.setting.step_tokens == 2048


# --- 8 -----------------------------------------------------------------------------------------


def test_case_8_targets_that_no_setting_meets_are_infeasible_and_noise_is_not_chased() -> None:
    slo = Slo((Target("tpot", 0.0001, 0.99), Target("longest_gap", 0.3, 0.99)))
    run = rig(
        proposes(chunk_cap_tokens=256, verdict="infeasible", gain=0.004, noise=0.02),
        options=options(slo=slo, search_requests=20),
    )
    run.run(4)
    record = next(r for r in run.records if r.proposal is not None)
    assert record.proposal is not None and record.proposal.verdict == "infeasible"
    assert record.proposal.binding is not None
    assert run.records[-1].reason is Reason.WITHIN_NOISE and not run.port.moving
    nearer = rig(
        proposes(chunk_cap_tokens=256, verdict="infeasible", gain=0.3, noise=0.02),
        options=options(slo=slo, search_requests=20),
    )
    nearer.run(5, until=pushed)
    assert nearer.records[-1].pushed == {"chunk_cap_tokens": 256}, "but a smaller miss is worth a trial"


# --- 12 ----------------------------------------------------------------------------------------


def clamped_rig(reply: Reply, **changes: Any) -> Rig:
    """An engine set to 2048 tokens whose steps never get more than 512, with others that wait."""
    engine = LiveEngine(Traffic(rate_rps=4.0, prompt_tokens=900, documents=0))
    desk = engine.running.desk
    honest = desk.begin_step

    def clamped(now_s: float) -> InForce:
        force = honest(now_s)
        return force._replace(setting=force.setting._replace(step_tokens=min(force.setting.step_tokens, 512)))

    desk.begin_step = clamped  # type: ignore[method-assign]  # a scheduler with a clamp of its own
    slo = Slo((Target("ttft", 0.3, 0.99),))
    given = options(slo=slo, search_requests=40, search_every_s=20.0, **changes)
    run = rig(reply, engine=engine, options=given)
    steps = run.port.steps_after

    def as_configured(after: int) -> wire.StepColumns:
        page = steps(after)
        return page.model_copy(update={"budget_tokens": tuple(2048 for _ in page.step)})

    run.port.steps_after = as_configured  # type: ignore[method-assign]  # the records say what is configured
    return run


def test_case_12_the_observed_ceiling_counts_where_the_set_budget_is_not_in_force() -> None:
    run = clamped_rig(proposes(verdict="keep"))
    run.run(8, until=lambda r: "not in force" in r.detail)
    assert "512 tokens" in run.records[-1].detail
    assert Signal.BUDGET_NEVER_REACHED.value in codes(run.records[-1])
    job = run.searcher.jobs[-1]
    assert job.base.step_tokens == 512
    assert job.bounds["step_tokens"][1] == 512.0, "a larger budget has no effect"


@pytest.mark.parametrize(
    "bounds",
    [{"chunk_cap_tokens": (0.0, 8192.0)}, {"chunk_cap_tokens": (0.0, 8192.0), "step_tokens": (1024.0, 4096.0)}],
)
def test_case_12_an_observed_ceiling_does_not_move_a_budget_the_operator_fixed(
    bounds: dict[str, tuple[float, float]],
) -> None:
    run = clamped_rig(proposes(chunk_cap_tokens=128), bounds=bounds)
    run.run(8, until=pushed)
    assert run.searcher.jobs[-1].base.step_tokens == 512
    assert "step_tokens" not in run.searcher.jobs[-1].bounds
    assert run.records[-1].pushed == {"chunk_cap_tokens": 128}, "the budget stays as it is set"


# --- 15 ----------------------------------------------------------------------------------------


def test_case_15_two_stable_levels_raise_an_alarm_and_are_not_chased() -> None:
    engine = LiveEngine(Traffic(rate_rps=1.0, documents=0, output_tokens=12, prompt_tokens=100), jitter=0.0)
    slo = Slo((Target("tpot", 0.06, 0.99),))
    run = rig(
        proposes(step_tokens=512), engine=engine, options=options(slo=slo, search_requests=30, search_every_s=20.0)
    )
    run.run(4)
    engine.slow = 4.0
    run.run(8, until=lambda r: r.reason is Reason.FROZEN_BY_SIGNAL)
    record = run.records[-1]
    assert (record.action, record.reason) == (Action.HOLD, Reason.FROZEN_BY_SIGNAL)
    assert Signal.TWO_TPOT_LEVELS.value in codes(record)
    run.run(2)
    assert not run.port.moving


# --- 17 ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_case_17_a_cap_of_half_the_budget_makes_equal_prompts_wait_more_evenly() -> None:
    """Four cold prompts of 20k at once, again and again; the spread of their TTFT is reported beside the tail."""

    def four(engine: LiveEngine) -> None:
        for _ in range(4):
            engine.submit(20_000, 2)

    def spread(engine: LiveEngine, cap: int) -> list[CycleRecord]:
        run = rig(proposes(chunk_cap_tokens=cap, gain=0.3), engine=engine, options=options(search_requests=4))
        for _ in range(3):
            four(engine)
            run.run(3)
        return run.records

    model = {"kv_blocks": 10_000, "model_tokens": 50_000}
    calm = Traffic(rate_rps=0.5, documents=0)
    plain = spread(LiveEngine(calm, **model), cap=1024)
    capped = spread(LiveEngine(calm, BOOT._replace(chunk_cap_tokens=1024), **model), cap=512)
    assert Signal.TTFT_SPREAD.value in codes(plain[2])
    assert all(Signal.TTFT_SPREAD.value not in codes(record) for record in capped)
    assert any(pushed(record) and record.pushed == {"chunk_cap_tokens": 1024} for record in plain)


# --- 18 ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_case_18_the_first_proposal_goes_all_the_way() -> None:
    """2,400 prompt tokens per second and gaps of at most 200 ms: at most 480 tokens, not a tenth less than 8,192."""
    model = StepModel(0.002, 0.0, 0.02, 0.0, 1.0 / 2400.0, 0.0, 0.0)
    traffic = Traffic(rate_rps=1.0, prompt_tokens=150, output_tokens=30, documents=25, document_tokens=20_000)
    slo = Slo((Target("longest_gap", 0.2, 0.99), Target("ttft", 60.0, 0.99)))
    boot = Setting(step_tokens=8192, max_running=32)
    engine = LiveEngine(traffic, boot=boot, model=model, kv_blocks=20_000, model_tokens=100_000)
    run = twin_rig(engine=engine, options=options(slo=slo, search_requests=60, window_s=300.0, trials=40))
    run.run(25, until=pushed)
    assert pushed(run.records[-1]) and run.records[-1].pushed is not None
    assert run.records[-1].pushed.get("step_tokens", 8192) <= 480


# --- 21 ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_case_21_without_a_target_on_gaps_the_budget_grows_and_then_stays() -> None:
    """Long prompts, a budget of 128 that the card's floor makes expensive: only the time to first token counts."""
    traffic = Traffic(rate_rps=0.8, prompt_tokens=2500, output_tokens=8, documents=0)
    engine = LiveEngine(traffic, boot=BOOT._replace(step_tokens=128), options={"ceiling_tokens": 2048})
    slo = Slo((Target("ttft", 3.0, 0.99),))
    given = options(slo=slo, search_requests=30, trials=40, verify_s=30.0, min_requests=20)
    run = twin_rig(engine=engine, options=given)
    run.run(30, until=pushed)
    assert run.records[-1].pushed is not None and run.records[-1].pushed["step_tokens"] >= 256
    run.run_trial()
    run.run(16)
    quiet = {Reason.NO_TARGETS_MISSED, Reason.NULL_RESULT, Reason.WITHIN_NOISE}
    assert run.records[-1].reason in quiet, "and stops"
    assert run.setting.step_tokens >= 256

"""The learner: what it keeps of a stream of steps, when it fits, how it handles drift and restarts."""

from dataclasses import replace

import numpy as np
import pytest

from rooftune.tuner.control.cycle.fit import Learner, checked_fit, noise_pairs
from rooftune.tuner.model.fit import fit_steps
from rooftune.tuner.model.reservoir import stratum_of
from rooftune.tuner.model.roofline import FitCode, FitRefused, predict
from rooftune.tuner.observe.rows import StepRows
from tests.control.doubles import MemoryStore
from tests.control.live import SLOW, LiveEngine


def steps_of(engine: LiveEngine) -> StepRows:
    pages, after = [], -1
    while True:
        page = engine.running.steps_after(after)
        if page.next == after:
            return StepRows.join(pages)
        pages.append(StepRows.from_wire(page))
        after = page.next


@pytest.fixture(scope="module", params=[0.0, 0.03], ids=["exact", "noisy"])
def steps(request: pytest.FixtureRequest) -> StepRows:
    engine = LiveEngine(jitter=request.param)
    engine.advance(150.0)
    return steps_of(engine)


def taught(steps: StepRows, pieces: int = 12) -> Learner:
    learner = Learner()
    for part in np.array_split(np.arange(len(steps)), pieces):
        learner.take(steps.select(part))
    return learner


def test_the_fit_recovers_the_engines_constants(steps: StepRows) -> None:
    fit = taught(steps).fit()
    assert fit.knee_tokens is not None and 150.0 <= fit.knee_tokens <= 260.0
    assert fit.coefficients["slope_s_per_token"] == pytest.approx(SLOW.slope_s_per_token, rel=0.05)


def test_the_fit_leaves_out_no_step_size(steps: StepRows) -> None:
    """Most steps are decodes; a fit that explains only those would be off by a third on every long step."""
    learner = taught(steps)
    samples = learner.samples()
    found = checked_fit(samples)
    long = samples.select(samples.computed_tokens > 1000)
    assert len(long) >= 20
    assert abs(np.median(np.log(long.duration_s / predict(found.model, long)))) < 0.05


def test_an_engine_overloaded_from_its_start_gets_a_model_of_its_few_steps_that_are_not_full() -> None:
    engine = LiveEngine(jitter=0.02)
    engine.silence()
    for prompt in (30, 200, 700, 1200):
        engine.submit(prompt, 3)
        engine.advance(1.0)
    for _ in range(250):
        engine.submit(8000, 2)
    engine.advance(400.0)
    steps = steps_of(engine)
    full = steps.samples().computed_tokens == 2048
    assert full.mean() > 0.98, "hardly a step of another size"
    learner = taught(steps)
    fit = learner.fit()
    assert fit.steps < 0.5 * len(steps) and fit.seen_low_tokens < 200.0
    samples = steps.samples()
    for mask in (full, ~full):
        part = samples.select(mask)
        assert abs(np.median(np.log(part.duration_s / predict(learner.model, part)))) < 0.1  # type: ignore[arg-type]


def test_a_fit_does_not_reject_a_step_size_because_the_rest_fits_tighter() -> None:
    """Two lines explain the decodes of this engine almost equally well; under one of them the longest are outliers."""
    engine = LiveEngine(jitter=0.01, seed=2)
    engine.advance(150.0)
    samples = taught(steps_of(engine)).samples()
    found = fit_steps(samples)
    assert found.outliers == 0.0
    off = np.log(samples.duration_s / predict(found.model, samples))
    strata = stratum_of(samples.computed_tokens)
    classes = [stratum for stratum in np.unique(strata) if (strata == stratum).sum() >= 8]
    assert len(classes) >= 8
    assert max(abs(np.median(off[strata == stratum])) for stratum in classes) < 0.02


def test_refits_become_rarer_as_steps_come_in(steps: StepRows) -> None:
    learner, fits = Learner(), 0
    for part in np.array_split(np.arange(len(steps)), 30):
        learner.take(steps.select(part))
        if learner.enough and learner.due:
            learner.fit()
            fits += 1
    assert 2 <= fits <= 12


def test_a_fit_with_an_open_side_is_repeated_soon(steps: StepRows) -> None:
    engine = LiveEngine(jitter=0.02)
    engine.silence()
    for tokens in (20, 30, 40, 50):
        engine.submit(tokens, 2 * tokens)
    engine.advance(60.0)
    learner = taught(steps_of(engine))
    few = len(steps_of(engine).samples())
    assert FitCode.SLOPE_UNKNOWN.value in learner.fit().codes and not learner.due
    learner.take(steps.select(np.arange(few // 2 + 1)))
    assert learner.due, "after half as many steps again, far fewer than with a closed side"


def test_a_refusal_is_not_repeated_on_the_same_steps() -> None:
    engine = LiveEngine(jitter=0.02)
    engine.silence()
    for _ in range(4):
        engine.submit(20, 200)
    engine.advance(60.0)
    learner = taught(steps_of(engine))
    assert learner.enough and learner.due
    with pytest.raises(FitRefused):
        learner.fit()
    assert not learner.due and learner.model is None


def test_the_accepted_model_outlives_the_controller_but_not_another_model(steps: StepRows) -> None:
    store = MemoryStore()
    learner = taught(steps)
    learner.recall(store, "m")
    accepted = learner.fit()
    again, other = Learner(), Learner()
    again.recall(store, "m")
    other.recall(store, "n")
    assert again.accepted == accepted and other.accepted is None
    store.values["model"] = "{}"
    broken = Learner()
    broken.recall(store, "m")
    assert broken.accepted is None


@pytest.mark.slow
def test_a_slower_engine_is_detected_and_refitted() -> None:
    engine = LiveEngine()
    learner = Learner()

    def pass_time(seconds: float, seen: int) -> int:
        engine.advance(seconds)
        page = steps_of(engine)
        learner.take(page.select(page.step >= seen))
        return int(page.step[-1]) + 1

    seen = pass_time(120.0, 0)
    learner.fit()
    for _ in range(16):
        seen = pass_time(30.0, seen)
    assert learner.drift is None, "nothing has changed"
    engine.slow = 1.4
    for _ in range(12):
        seen = pass_time(30.0, seen)
        if learner.drift is not None:
            break
    assert learner.drift is not None and learner.drift.slower
    part = learner.part()
    assert part is not None and part.drift_ratio is not None and part.drift_ratio > 1.1
    for _ in range(6):
        seen = pass_time(30.0, seen)
    assert learner.due
    learner.fit()
    assert learner.drift is None
    assert learner.model is not None
    assert learner.model.slope_s_per_token == pytest.approx(1.4 * SLOW.slope_s_per_token, rel=0.1)


def test_what_is_sampled_after_a_drift_is_kept_until_there_is_a_refit(steps: StepRows) -> None:
    """A persistent alarm must not leave every fit with only the steps of one cycle."""
    learner = taught(steps)
    learner.recall(MemoryStore(), "m")
    learner.fit()
    decodes = steps.select(steps.prefill_tokens == 0)
    one_size = decodes.select(decodes.decode_tokens == np.bincount(decodes.decode_tokens).argmax())
    decodes = StepRows.join([one_size] * (4000 // len(one_size)))  # of these no fit can be made
    slower = replace(decodes, duration_s=1.6 * decodes.duration_s)
    learner.take(decodes)  # teaches the alarm what is usual
    assert learner.drift is None
    sampled, pieces, seen = [], np.array_split(np.arange(len(slower)), 40), 0
    for part in pieces:
        learner.take(slower.select(part))
        if learner.drift is None:
            continue
        if not sampled:
            assert learner.due and len(learner.samples()) <= len(part)
        sampled.append(len(learner.samples()))
        if seen == 0 and learner.enough:
            with pytest.raises(FitRefused):
                learner.fit()
            assert not learner.due
        seen += len(part) if seen or learner.enough else 0
        if seen > 1000:
            break
    assert sampled == sorted(sampled) and sampled[-1] >= 500
    assert learner.due, "and a refusal holds for hundreds of steps, not forever"


def test_another_model_on_the_engine_starts_over(steps: StepRows) -> None:
    store = MemoryStore()
    learner = taught(steps)
    learner.recall(store, "m")
    learner.fit()
    learner.restart()
    learner.recall(store, "n")
    assert learner.model is None
    learner.recall(store, "m")
    assert learner.model is not None, "and the first one's is still in the store"


def test_an_engine_restart_starts_over(steps: StepRows) -> None:
    learner = taught(steps)
    learner.fit()
    learner.restart()
    assert not learner.enough and learner.model is not None, "the model stays until there is a newer one"


def test_noise_gets_the_same_steps_twice(steps: StepRows) -> None:
    modelled, measured = noise_pairs(SLOW, steps, most=500)
    assert len(modelled) == len(measured) == 500
    assert measured == tuple(steps.samples().duration_s[-500:])

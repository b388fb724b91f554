"""The fit: right where the data is informative, open where it is not, and never a confident knee from bad data."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from rooftune.policies.step_time import NAMED_MODELS, StepModel, knee_tokens, step_time
from rooftune.tuner.bench.knee_fit import knee_log_sd_bound, make_steps
from rooftune.tuner.model.fit import fit_steps
from rooftune.tuner.model.prior import card_prior
from rooftune.tuner.model.roofline import FitCode, FitRefused, StepFit, mape, predict
from rooftune.tuner.model.samples import StepSamples, join

TRUTH = NAMED_MODELS["8b-2tbs"]
SEEDS = range(12)


def fits(
    model: StepModel = TRUTH, *, steps: int = 2000, tokens: tuple[int, int] = (1, 4096), noise: float = 0.1
) -> list[StepFit]:
    return [fit_steps(make_steps(model, seed, steps, tokens=tokens, noise=noise)) for seed in SEEDS]


def covered(found: list[StepFit], knee: float) -> int:
    return sum(knee in fit.knee_interval for fit in found)


def test_prediction_by_column_is_the_shared_formula() -> None:
    steps = make_steps(TRUTH, seed=0, steps=200)
    for model in (TRUTH, TRUTH._replace(sharpness=3.0), NAMED_MODELS["teaching-lab"], TRUTH._replace(sharpness=1.0)):
        one_by_one = [
            step_time(model, *row)
            for row in zip(
                steps.computed_tokens, steps.sequences, steps.context_tokens, steps.attention_work, strict=True
            )
        ]
        np.testing.assert_allclose(predict(model, steps), one_by_one, rtol=1e-12)


def test_the_knee_is_found_within_its_interval_and_near_the_bound_of_any_fit() -> None:
    found = fits()
    errors = [abs(math.log((fit.knee_tokens or 1.0) / 200.0)) for fit in found]
    bound = np.mean([knee_log_sd_bound(TRUTH, make_steps(TRUTH, seed), 0.1, 0.02) for seed in SEEDS])
    assert float(np.median(errors)) <= 0.03
    assert float(np.sqrt(np.mean(np.square(errors)))) <= 1.3 * bound
    assert covered(found, 200.0) >= 11
    for name in ("overhead_s", "floor_s", "kv_s_per_token", "slope_s_per_token"):
        assert sum(fit.intervals[name].low <= getattr(TRUTH, name) <= fit.intervals[name].high for fit in found) >= 10
    assert all(fit.outliers == pytest.approx(0.02, abs=0.015) for fit in found)
    live = [knee_tokens(TRUTH, fit.context_tokens) in fit.knee_at_context_interval for fit in found]
    assert sum(live) >= 11


@pytest.mark.slow
def test_an_interval_is_narrow_enough_to_be_useful() -> None:
    for fit in fits():
        assert fit.knee_interval.high / fit.knee_interval.low < 1.3


@pytest.mark.slow
@pytest.mark.parametrize("sharpness", [2.0, 4.0])
def test_a_soft_knee_is_recognised_and_covered_by_its_interval(sharpness: float) -> None:
    found = fits(TRUTH._replace(sharpness=sharpness))
    assert covered(found, 200.0) >= 11
    assert all(fit.model.sharpness > 0.0 for fit in found)
    assert (
        sum(sharpness in fit.intervals["sharpness"] or 0 < fit.model.sharpness < 3 * sharpness for fit in found) >= 11
    )


@pytest.mark.slow
def test_few_or_noisy_steps_widen_the_interval() -> None:
    sharp = np.median([fit.knee_interval.high / fit.knee_interval.low for fit in fits()])
    for found in (fits(steps=150), fits(noise=0.3)):
        assert covered(found, 200.0) >= 11
        assert np.median([fit.knee_interval.high / fit.knee_interval.low for fit in found]) > 1.15 * sharp


def test_steps_below_the_knee_leave_the_slope_unknown() -> None:
    for fit in fits(tokens=(1, 120)):
        assert fit.knee_tokens is None and math.isinf(fit.knee_interval.high)
        assert FitCode.SLOPE_UNKNOWN in fit.codes
        assert TRUTH.slope_s_per_token in fit.intervals["slope_s_per_token"]
        assert TRUTH.floor_s in fit.intervals["floor_s"] and TRUTH.overhead_s in fit.intervals["overhead_s"]
        assert any("probe" in line for line in fit.findings())


def test_steps_above_the_knee_leave_the_floor_unknown() -> None:
    found = fits(tokens=(500, 4096))
    for fit in found:
        assert fit.knee_tokens is None and fit.knee_interval.low == 0.0
        assert FitCode.FLOOR_UNKNOWN in fit.codes
        assert TRUTH.floor_s in fit.intervals["floor_s"]
    assert sum(TRUTH.slope_s_per_token in fit.intervals["slope_s_per_token"] for fit in found) >= 10


def test_few_steps_growing_from_the_first_token_leave_the_floor_open_not_the_slope() -> None:
    found = [fit_steps(fast_growing(seed)) for seed in range(12)]
    assert all(fit.knee_tokens is None for fit in found)
    assert all(FitCode.FLOOR_UNKNOWN in fit.codes and FitCode.SLOPE_UNKNOWN not in fit.codes for fit in found)


def fast_growing(seed: int) -> StepSamples:
    """60 lone steps of an engine without a floor, a quarter of them off by half, as on a busy laptop."""
    chance = np.random.default_rng(seed)
    tokens = chance.choice([1, 2, 8, 16, 32, 64, 128, 256, 512, 1024], 60)
    prefill = np.where(tokens > 1, tokens, 0)
    work = 0.5 * prefill.astype(float) ** 2
    time_s = (0.06 + 8e-4 * tokens + 3e-7 * work) * np.exp(chance.normal(0.0, 0.25, 60))
    nothing = np.zeros(60)
    return StepSamples(time_s, prefill, tokens - prefill, np.ones(60), nothing, nothing, work)


@pytest.mark.slow
def test_an_engine_without_a_floor_has_no_knee_to_print() -> None:
    for fit in fits(TRUTH._replace(floor_s=0.0, kv_s_per_token=0.0)):
        assert fit.knee_tokens is None and fit.knee_interval.low == 0.0


@pytest.mark.slow
def test_an_engine_that_never_slows_has_no_knee_to_print() -> None:
    for fit in fits(TRUTH._replace(slope_s_per_token=0.0, attention_s=0.0)):
        assert fit.knee_tokens is None and math.isinf(fit.knee_interval.high)


@pytest.mark.slow
def test_decode_only_traffic_does_not_give_a_knee() -> None:
    for seed in SEEDS:
        steps = make_steps(TRUTH, seed, tokens=(1, 64))
        total = steps.computed_tokens
        empty = np.zeros(len(steps))
        only = replace(
            steps, prefill_tokens=empty, decode_tokens=total, sequences=total,
            prefill_context_tokens=empty, attention_work=empty,
        )  # fmt: skip
        only = replace(
            only, duration_s=predict(TRUTH, only) * np.exp(0.05 * np.random.default_rng(seed).normal(size=2000))
        )
        fit = fit_steps(only)
        assert fit.knee_tokens is None and FitCode.SLOPE_UNKNOWN in fit.codes
        assert FitCode.ATTENTION_UNKNOWN in fit.codes


def test_without_variation_in_context_its_price_is_unknown() -> None:
    steps = make_steps(TRUTH, seed=1)
    empty = np.zeros(len(steps))
    flat = replace(steps, decode_context_tokens=empty, prefill_context_tokens=empty, duration_s=empty + 1.0)
    fit = fit_steps(
        replace(flat, duration_s=predict(TRUTH, flat) * np.exp(0.1 * np.random.default_rng(1).normal(size=2000)))
    )
    assert FitCode.CONTEXT_UNKNOWN in fit.codes
    assert 200.0 in fit.knee_interval and fit.knee_tokens is not None


def shuffled(steps: StepSamples, random: np.random.Generator) -> StepSamples:
    return replace(steps, duration_s=random.permutation(steps.duration_s))


def two_engines(steps: StepSamples, random: np.random.Generator) -> StepSamples:
    other = make_steps(TRUTH, int(random.integers(1000, 2000)))
    return join([steps, replace(other, duration_s=4.0 * other.duration_s)])


def falling(steps: StepSamples, random: np.random.Generator) -> StepSamples:
    return replace(
        steps, duration_s=0.5 / np.sqrt(steps.computed_tokens) * np.exp(0.05 * random.normal(size=len(steps)))
    )


REFUSED: list[tuple[FitCode, Callable[[StepSamples, np.random.Generator], StepSamples]]] = [
    (FitCode.TOO_FEW_STEPS, lambda s, r: s.select(np.arange(30))),
    (FitCode.NO_TOKEN_VARIATION, lambda s, r: s.select(np.full(500, 17))),
    (FitCode.COARSE_CLOCK, lambda s, r: replace(s, duration_s=np.full(len(s), 0.02))),
    (FitCode.COARSE_CLOCK, lambda s, r: replace(s, duration_s=np.maximum(np.round(s.duration_s, 2), 0.01))),
    (FitCode.CONTRADICTORY, lambda s, r: replace(s, duration_s=np.exp(r.normal(-4.0, 1.0, len(s))))),
    (FitCode.CONTRADICTORY, shuffled),
    (FitCode.CONTRADICTORY, two_engines),
    (FitCode.CONTRADICTORY, falling),
]


@pytest.mark.parametrize(("code", "spoil"), REFUSED)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_hopeless_data_is_refused_with_a_code(
    code: FitCode, spoil: Callable[[StepSamples, np.random.Generator], StepSamples], seed: int
) -> None:
    with pytest.raises(FitRefused) as refusal:
        fit_steps(spoil(make_steps(TRUTH, seed), np.random.default_rng(seed)))
    assert refusal.value.code is code and refusal.value.exit_code == 1


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_steps_that_the_formula_cannot_describe_give_no_knee(seed: int) -> None:
    steps = make_steps(TRUTH, seed)
    noise = np.exp(0.05 * np.random.default_rng(seed).normal(size=len(steps)))
    fit = fit_steps(replace(steps, duration_s=0.002 * np.sqrt(steps.computed_tokens) * noise))
    assert fit.knee_tokens is None and FitCode.MISFIT in fit.codes
    assert (fit.knee_interval.low, fit.knee_interval.high) == (0.0, math.inf)


@pytest.mark.parametrize("share", [0.1, 0.25])
def test_a_minority_of_outliers_changes_nothing(share: float) -> None:
    clean = make_steps(TRUTH, seed=4, outliers=0.0)
    random = np.random.default_rng(4)
    wild = replace(clean, duration_s=clean.duration_s * np.where(random.random(2000) < share, 30.0, 1.0))
    fit = fit_steps(wild)
    assert 200.0 in fit.knee_interval
    assert fit.knee_tokens == pytest.approx(fit_steps(clean).knee_tokens, rel=0.04)


def test_order_of_the_steps_does_not_matter_and_the_fit_is_deterministic() -> None:
    steps = make_steps(TRUTH, seed=5)
    fit = fit_steps(steps)
    assert fit_steps(steps) == fit
    mixed = fit_steps(steps.select(np.random.default_rng(0).permutation(len(steps))))
    assert mixed.knee_tokens == pytest.approx(fit.knee_tokens, rel=0.01)


def test_an_incremental_refit_agrees_with_a_fresh_one() -> None:
    steps = make_steps(TRUTH, seed=6)
    again = fit_steps(steps, start=fit_steps(make_steps(TRUTH, seed=7)).model)
    assert again.knee_tokens == pytest.approx(fit_steps(steps).knee_tokens, rel=0.01)


def test_a_prior_leads_only_where_the_data_is_silent() -> None:
    wrong = TRUTH._replace(floor_s=0.012, slope_s_per_token=8e-5)
    silent, loud = make_steps(TRUTH, 8, tokens=(1, 100)), make_steps(TRUTH, 8)
    leaning = fit_steps(silent, wrong)
    assert leaning.intervals["slope_s_per_token"].high > 8e-5
    assert leaning.model.slope_s_per_token == pytest.approx(8e-5, rel=0.3)
    assert {FitCode.SLOPE_UNKNOWN, FitCode.PRIOR_USED} <= set(leaning.codes)
    assert fit_steps(loud, wrong).knee_tokens == pytest.approx(fit_steps(loud).knee_tokens, rel=0.05)
    right = fit_steps(silent, card_prior("a100-80gb", 8e9, "fp16"))
    assert right.knee_interval.bounded and 200.0 in right.knee_interval
    assert right.knee_interval.high / right.knee_interval.low > 2.0


def test_error_is_a_fraction_of_the_measured_time() -> None:
    steps = make_steps(TRUTH, 0, noise=0.0, outliers=0.0)
    assert mape(TRUTH, steps) == pytest.approx(0.0, abs=1e-12)
    assert mape(TRUTH, replace(steps, duration_s=2.0 * steps.duration_s)) == pytest.approx(0.5)

"""A replay that begins in mid-run goes on as the whole run does, to the instant."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rooftune.policies.errors import InputError
from rooftune.policies.request import DEADLINE, Boot, Setting
from rooftune.policies.step_time import NAMED_MODELS
from rooftune.tuner.sim.engine import Engine
from rooftune.tuner.sim.progress import Progress
from rooftune.tuner.sim.result import RunResult
from rooftune.tuner.sim.twin import Ends, simulate
from rooftune.tuner.traffic.workload import Traffic

MODEL = NAMED_MODELS["8b-2tbs"]
BOOT = Boot(2048, 16, 1, 1, 0, 1)


def traffic(seed: int, requests: int) -> Traffic:
    """Chats and a few documents, faster than the small budgets below can serve."""
    chance = np.random.default_rng(seed)
    long = chance.random(requests) < 0.2
    return Traffic(
        arrival_s=np.cumsum(chance.exponential(0.05, requests)),
        prompt_tokens=np.where(long, chance.integers(500, 3000, requests), chance.integers(1, 200, requests)),
        output_tokens=chance.integers(1, 40, requests),
        cached_tokens=np.zeros(requests, dtype=np.int64),
        tenant=np.zeros(requests, dtype=np.int64),
    )


def rest_of(whole: Traffic, cut: RunResult) -> tuple[Traffic, Progress, np.ndarray]:
    """What the cut run left: its traffic, its progress on rows of that traffic, and the rows of the whole."""
    left = cut.left
    open_yet = np.isnan(cut.outcomes.finish_s)
    open_yet[left.request] = False
    later = np.flatnonzero(open_yet)
    rows = np.concatenate([np.sort(left.request), later]).astype(np.int64)
    columns = {
        name: getattr(whole, name)[rows]
        for name in ("arrival_s", "prompt_tokens", "output_tokens", "cached_tokens", "tenant")
    }
    place = np.searchsorted(np.sort(left.request), left.request)
    return Traffic(**columns), replace(left, request=place.astype(np.int64)), rows


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    steps=st.integers(1, 400),
    kv_blocks=st.sampled_from([260, 400, 10_000]),
    setting=st.sampled_from(
        [
            Setting(2048, max_running=64),
            Setting(128, max_running=16),
            Setting(256, chunk_cap_tokens=64, max_partial_prefills=2, max_running=16),
            Setting(
                256, order_policy=DEADLINE, aging_s=1.0, ttft_target_s=0.5, prefill_s_per_token=1e-4, max_running=16
            ),
        ]
    ),
)
def test_a_replay_begun_in_mid_run_goes_on_as_the_whole_run(
    seed: int, steps: int, kv_blocks: int, setting: Setting
) -> None:
    whole, engine = traffic(seed, 60), Engine(BOOT, kv_blocks)
    through = simulate(whole, engine, setting, MODEL)
    cut = simulate(whole, engine, setting, MODEL, ends=Ends(most_steps=steps), skip=False)
    if cut.outcomes.finished.all():
        return
    rest, progress, rows = rest_of(whole, cut)
    onward = simulate(rest, engine, setting, MODEL, progress=progress)
    for label in ("scheduled_s", "first_token_s", "finish_s", "longest_gap_s"):
        expected = getattr(through.outcomes, label)[rows]
        np.testing.assert_allclose(getattr(onward.outcomes, label), expected, rtol=1e-9, err_msg=label)


def test_a_pool_too_small_for_what_runs_lets_the_newest_wait() -> None:
    whole = traffic(1, 20)
    cut = simulate(whole, Engine(BOOT, 10_000), Setting(256, max_running=16), MODEL, ends=Ends(most_steps=40))
    rest, progress, _ = rest_of(whole, cut)
    assert progress.running > 1
    least = -(-int((rest.prompt_tokens + rest.output_tokens).max()) // 16)
    outcomes = simulate(rest, Engine(BOOT, least), Setting(256, max_running=16), MODEL, progress=progress).outcomes
    assert outcomes.finished.all()


def test_progress_must_be_the_first_rows_of_the_traffic() -> None:
    whole = traffic(2, 20)
    cut = simulate(whole, Engine(BOOT, 10_000), Setting(256, max_running=16), MODEL, ends=Ends(most_steps=40))
    rest, progress, _ = rest_of(whole, cut)
    wrong = replace(progress, request=progress.request + 1)
    with pytest.raises(InputError, match="first rows"):
        simulate(rest, Engine(BOOT, 10_000), Setting(256, max_running=16), MODEL, progress=wrong)
    pool = Engine(BOOT._replace(contents=1), 10_000)
    with pytest.raises(InputError, match="contents"):
        simulate(rest, pool, Setting(256, max_running=16), MODEL, progress=progress)

"""The switchback of a trial: its order of turns, the error it may make, and what it does with little."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from scipy.stats import t

from rooftune.policies.proof.switchback import (
    LEAST_DEGREES,
    PAIRS,
    SPENT,
    Block,
    Outcome,
    harmful,
    judge_pairs,
    schedule,
    student,
)
from rooftune.policies.verify import Verdict

JUDGED = 60.0


def trial(seed: int, gain: float, scatter: float = 0.08, share: float = 0.5) -> tuple[list[Block], list[Block]]:
    """A trial and 20 blocks before it; the share scatters and wanders from block to block."""
    chance = np.random.default_rng(seed)
    arms = (False,) * 20 + schedule(seed)
    wander, level = 0.0, []
    for new in arms:
        wander = 0.9 * wander + chance.normal(0.0, scatter)
        level.append(share + wander / 2.0 + chance.normal(0.0, scatter) + gain * new)
    blocks = [Block(new, JUDGED * min(max(at, 0.0), 1.0), JUDGED) for new, at in zip(arms, level, strict=True)]
    return blocks[20:], blocks[:20]


def first(blocks: Sequence[Block], history: Sequence[Block]) -> Outcome:
    """The outcome of the look that gives a verdict, or of the last."""
    for pairs in PAIRS:
        outcome = judge_pairs(blocks[: 2 * pairs], history)
        if outcome.verdict is not Verdict.INCONCLUSIVE:
            break
    return outcome


def test_each_pair_has_both_settings_and_chance_decides_which_comes_first() -> None:
    for seed in range(50):
        arms = schedule(seed)
        assert len(arms) == 2 * PAIRS[-1]
        assert all(one != other for one, other in zip(arms[::2], arms[1::2], strict=True))
    firsts = np.array([schedule(seed)[::2] for seed in range(2000)])
    assert firsts.mean(axis=0) == pytest.approx(0.5, abs=0.05)
    assert abs(np.corrcoef(firsts[:, 0], firsts[:, 1])[0, 1]) < 0.08
    assert schedule(7) == schedule(7)


def test_the_looks_share_out_less_than_five_percent() -> None:
    assert len(SPENT) == len(PAIRS)
    assert sum(SPENT) <= 0.05
    assert all(one < other for one, other in pairwise(PAIRS))


def test_student_is_never_too_narrow_and_at_most_four_percent_too_wide() -> None:
    for degrees in (LEAST_DEGREES, 5.3, 8.0, 13.3, 40.0, 200.0):
        for tails in SPENT:
            exact = float(t.ppf(1.0 - tails / 2.0, degrees))
            assert exact <= student(tails, degrees) * (1.0 + 1e-4) <= 1.04 * exact


@pytest.mark.parametrize("history", [True, False])
def test_chance_alone_gives_a_verdict_in_at_most_five_of_a_hundred_trials(history: bool) -> None:
    found = [first(blocks, before if history else []) for blocks, before in (trial(seed, 0.0) for seed in range(400))]
    assert sum(one.verdict is not Verdict.INCONCLUSIVE for one in found) / len(found) <= 0.05


def test_a_larger_gain_is_found_sooner_and_a_loss_like_a_gain() -> None:
    pairs = [np.mean([first(*trial(seed, gain)).pairs for seed in range(60)]) for gain in (0.05, 0.15, 0.4)]
    assert pairs[0] > pairs[1] > pairs[2]
    assert pairs[2] <= 3.0
    assert {first(*trial(seed, 0.4)).verdict for seed in range(60)} == {Verdict.BETTER}
    assert {first(*trial(seed, -0.4)).verdict for seed in range(60)} == {Verdict.WORSE}


def test_the_time_before_brings_the_verdict_on_a_large_gain_forward() -> None:
    with_it, without = (
        np.mean([first(blocks, before[:kept]).pairs for blocks, before in (trial(seed, 0.3) for seed in range(60))])
        for kept in (20, 0)
    )
    assert with_it < without


def test_a_history_too_quiet_for_the_trial_makes_no_verdict() -> None:
    quiet = [Block(False, JUDGED, JUDGED)] * 20
    found = [first(trial(seed, 0.0, scatter=0.05, share=0.8)[0], quiet).verdict for seed in range(400)]
    assert sum(verdict is not Verdict.INCONCLUSIVE for verdict in found) / len(found) <= 0.05


def explained(blocks: Sequence[Block], seed: int, noise: float) -> list[Block]:
    """The twin knows each block's share but for ``noise``; it does not know the setting."""
    chance = np.random.default_rng(seed)
    return [
        Block(b.new, b.good, b.judged, b.good / b.judged - 0.15 * b.new + chance.normal(0.0, noise)) for b in blocks
    ]


@pytest.mark.parametrize(("noise", "narrower"), [(0.02, 0.5), (10.0, 1.1)])
def test_a_twin_that_knows_narrows_the_interval_and_one_that_does_not_hardly_widens_it(
    noise: float, narrower: float
) -> None:
    ratios = []
    for seed in range(40):
        blocks, before = trial(seed, 0.15)
        plain = judge_pairs(blocks[:18], before)
        twin = judge_pairs(explained(blocks, seed, noise)[:18], explained(before, seed + 1000, noise))
        ratios.append(twin.half_width / plain.half_width)
    assert np.median(ratios) < narrower


def test_a_twin_that_was_right_to_the_request_is_not_taken_to_be_so_for_ever() -> None:
    """Four and three of fifty are missed in the old blocks of two pairs; until then the twin foretold every one."""
    good = (41.0, 43.0, 37.0, 36.0, 42.0, 40.0, 39.0, 44.0)
    history = [Block(False, one, 50.0, one / 50.0) for one in good]
    pairs = [(True, 38.0, 38.0), (False, 35.0, 39.0), (True, 42.0, 42.0), (False, 37.0, 40.0)]
    found = judge_pairs([Block(new, one, 50.0, foretold / 50.0) for new, one, foretold in pairs], history)
    assert found.slope == 1.0 and found.verdict is Verdict.INCONCLUSIVE
    assert found.half_width > found.gain > 0.06


def test_one_unknown_expectation_leaves_the_twin_out() -> None:
    blocks, before = trial(3, 0.15)
    known, history = explained(blocks, 3, 0.02), explained(before, 4, 0.02)
    known[1] = replace(known[1], expected=math.nan)
    assert judge_pairs(known, history) == judge_pairs(blocks, before)


def test_before_the_first_look_nothing_is_said() -> None:
    blocks, before = trial(0, 0.4)
    early = judge_pairs(blocks[:3], before)
    assert (early.looked, early.pairs, early.verdict) == (False, 0, Verdict.INCONCLUSIVE)
    assert math.isnan(early.gain) and early.half_width == math.inf


def test_between_looks_the_latest_one_stands() -> None:
    blocks, before = trial(0, 0.1)
    assert PAIRS[2:4] == (4, 6)
    assert judge_pairs(blocks[:11], before) == judge_pairs(blocks[:8], before)


def test_empty_blocks_and_an_empty_history_are_no_pairs() -> None:
    empty = [Block(new, 0.0, 0.0) for new in schedule(0)]
    silent = judge_pairs(empty, [Block(False, 0.0, 0.0)] * 20)
    assert silent.verdict is Verdict.INCONCLUSIVE and silent.half_width == math.inf and math.isnan(silent.gain)
    blocks, before = trial(1, 0.4)
    holed = [Block(blocks[0].new, 0.0, 0.0), *blocks[1:12]]
    assert judge_pairs(holed, before).verdict is Verdict.BETTER
    assert judge_pairs(blocks[:4], []).half_width == math.inf  # two pairs know their scatter too little


def test_equal_blocks_without_any_scatter_are_no_gain() -> None:
    blocks = [Block(new, JUDGED, JUDGED) for new in schedule(0)]
    assert judge_pairs(blocks, blocks[:0]).verdict is Verdict.INCONCLUSIVE


def test_one_request_of_sixty_in_every_pair_is_no_loss_at_once() -> None:
    blocks = [Block(new, JUDGED - new, JUDGED) for new in schedule(0)]
    assert judge_pairs(blocks[:8], []).verdict is Verdict.INCONCLUSIVE
    assert judge_pairs(blocks[:8], [Block(False, JUDGED, JUDGED)] * 20).verdict is Verdict.INCONCLUSIVE


def given_up(seed: int, gain: float) -> int | None:
    """After how many blocks under the new setting caution gives the trial up."""
    blocks, before = trial(seed, gain)
    for until in range(1, len(blocks) + 1):
        if harmful(blocks[:until], before):
            return sum(block.new for block in blocks[:until])
    return None


def test_a_harmful_setting_is_given_up_within_two_blocks_and_a_harmless_one_seldom() -> None:
    harmed = [given_up(seed, -0.3) for seed in range(200)]
    assert sum(at is not None and at <= 2 for at in harmed) / len(harmed) > 0.5
    assert sum(given_up(seed, 0.0) is not None for seed in range(200)) / 200 < 0.15
    assert sum(given_up(seed, 0.15) is not None for seed in range(200)) / 200 < 0.05


def test_without_an_old_or_a_new_block_there_is_no_harm() -> None:
    blocks, before = trial(0, -0.4)
    assert not harmful([], before)
    assert not harmful([block for block in blocks if not block.new], before)
    assert not harmful([block for block in blocks if block.new], [])

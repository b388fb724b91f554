"""The fake runner is a strict stand-in: its tokens depend on the KV entries it reads, its time on the model."""

import pytest

from rooftune.engine.fake import VOCAB_TOKENS, FakeRunner, ManualClock
from rooftune.engine.step import Sampling, Segment, StepBatch
from rooftune.policies.step_time import StepModel, step_time
from tests.engine.fake_tokens import expected_tokens

MODEL = StepModel(0.001, 0.0001, 0.002, 1e-5, 1e-4, 1e-6, 0.0)
PROMPT = [5, 9, 2, 7, 7, 1]


def fake(**options: object) -> FakeRunner:
    return FakeRunner(kv_blocks=8, block_tokens=4, **options)  # type: ignore[arg-type]  # passed on


def one(tokens: list[int], start: int, table: list[int], sample: bool = True, seed: int = 0) -> StepBatch:
    return StepBatch((Segment(tokens, start, table, sample, Sampling(seed=seed)),))


def test_tokens_do_not_depend_on_how_the_prompt_is_cut() -> None:
    wanted = expected_tokens(PROMPT, 3)
    for cut in range(1, len(PROMPT)):
        runner = fake()
        assert runner.run(one(PROMPT[:cut], 0, [6, 1], sample=False)) == []
        got = runner.run(one(PROMPT[cut:], cut, [6, 1]))
        got += runner.run(one(got[-1:], 6, [6, 1]))
        got += runner.run(one(got[-1:], 7, [6, 1]))
        assert got == wanted


def test_tokens_depend_on_content_and_seed_and_lie_in_the_upper_half() -> None:
    sampled = {tuple(expected_tokens([*PROMPT[:4], last], 4, seed)) for last in range(20) for seed in range(5)}
    assert len(sampled) == 100
    assert all(VOCAB_TOKENS // 2 <= token < VOCAB_TOKENS for tokens in sampled for token in tokens)


def test_a_wrong_block_is_detected() -> None:
    runner = fake()
    other = [*PROMPT[:3], 3, *PROMPT[4:]]
    runner.run(StepBatch((Segment(PROMPT, 0, [0, 1], True), Segment(other, 0, [2, 3], True))))
    with pytest.raises(ValueError, match="position 4 does not follow"):
        runner.run(one([8], 6, [2, 1]))
    with pytest.raises(ValueError, match="position 0 does not follow"):
        runner.run(one([8], 6, [5, 1]))
    with pytest.raises(ValueError, match="block 8"):
        runner.run(one([8], 6, [0, 1, 8][1:]))


def test_an_unwritten_prefix_is_detected_without_reading_all_of_it() -> None:
    with pytest.raises(ValueError, match="position 3 was never written"):
        fake(read_all=False).run(one([8], 4, [0, 1]))


def test_a_step_takes_the_time_that_the_model_predicts() -> None:
    clock = ManualClock(5.0)
    runner = fake(cost=MODEL, clock=clock)
    sampled = runner.run(one(PROMPT, 0, [0, 1]))
    first_s = step_time(MODEL, 6, 1, 0, 18.0)
    assert clock.now_s == 5.0 + first_s
    # A decode of the one, beside one token of another's prompt: only the prompt token has attention work.
    runner.run(one([4], 0, [2], sample=False))
    before_s = clock.now_s
    runner.run(StepBatch((Segment(sampled, 6, [0, 1], True), Segment([3], 1, [2], False))))
    assert clock.now_s - before_s == pytest.approx(step_time(MODEL, 2, 2, 7, 1.5), rel=1e-9)
    assert (runner.steps, runner.computed_tokens) == (3, 9)

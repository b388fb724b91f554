"""Steps of a size seen before."""

import numpy as np

from policies.step_time import NAMED_MODELS
from tuner.bench.knee_synthetic import make_steps
from tuner.model.warm import seen_before


def test_only_the_first_step_of_each_size_is_left_out() -> None:
    steps = make_steps(NAMED_MODELS["8b-2tbs"], 1, steps=500)
    mask = seen_before(steps)
    tokens = steps.computed_tokens.tolist()
    assert mask.tolist() == [tokens[index] in tokens[:index] for index in range(500)]
    assert not seen_before(steps.select(np.array([3]))).any()

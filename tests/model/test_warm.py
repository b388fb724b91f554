"""Steps of a size seen before."""

from dataclasses import replace

import numpy as np
import pytest

from rooftune.policies.step_time import NAMED_MODELS
from rooftune.tuner.bench.knee_fit import make_steps
from rooftune.tuner.model.fit import first_steps_cost, seen_before


def test_only_the_first_step_of_each_size_is_left_out() -> None:
    steps = make_steps(NAMED_MODELS["8b-2tbs"], 1, steps=500)
    mask = seen_before(steps)
    tokens = steps.computed_tokens.tolist()
    assert mask.tolist() == [tokens[index] in tokens[:index] for index in range(500)]
    assert not seen_before(steps.select(np.array([3]))).any()


def test_first_steps_are_left_out_only_if_they_cost_more() -> None:
    model = NAMED_MODELS["8b-2tbs"]
    steps = make_steps(model, 1, steps=800)
    assert first_steps_cost(steps, model) == 0.0
    first = ~seen_before(steps)
    dearer = replace(steps, duration_s=np.where(first, 1.3 * steps.duration_s, steps.duration_s))
    assert first_steps_cost(dearer, model) == pytest.approx(0.3, abs=0.06)
    # A few steps prove nothing.
    assert first_steps_cost(dearer.select(np.arange(30)), model) == 0.0

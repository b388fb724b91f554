"""Where the fit starts: for several trial knees the formula is linear, and the best robust line wins."""

import numpy as np
from rooftune.policies.step_time import StepModel
from rooftune.tuner.model.columns import Columns
from rooftune.tuner.model.samples import FloatArray
from rooftune.tuner.model.solver import Problem, robust_order

_TRIAL_KNEES = 7
_ROUNDS = 4


def starting_points(columns: Columns, problem: Problem, rows: slice, keep: int = 3) -> list[FloatArray]:
    """The ``keep`` best coefficient vectors (solver's units) among trial knees between the seen token counts.

    Different ones: neighbouring knees that part the steps alike lead to the same line.
    rows: the rows of the samples that ``problem`` holds.
    """
    tokens = columns.samples.computed_tokens[rows]
    low, high = float(tokens.min()), float(tokens.max())
    knees = np.exp(np.linspace(np.log(low), np.log(high), _TRIAL_KNEES + 2))[1:]
    found: list[FloatArray] = []
    for knee in knees:
        theta = _linear(problem, tokens < knee)
        if not any(np.allclose(theta, other, rtol=1e-3, atol=1e-6) for other in found):
            found.append(theta)
    best = robust_order([problem.residual(theta, 0.0)[0] for theta in found])
    return [found[place] for place in best[:keep]]


def starting_point_of(columns: Columns, model: StepModel) -> FloatArray:
    """An earlier model in the solver's units."""
    return np.array([getattr(model, name) for name in columns.used]) / columns.scale


def _linear(problem: Problem, below: FloatArray) -> FloatArray:
    """Least absolute relative error by reweighting, the flat group below the knee and the growing one above it."""
    flat = below[:, None] * problem.memory
    growing = (1.0 - below)[:, None] * problem.compute
    design = np.concatenate([problem.outside, flat, growing], axis=1)
    relative = design / np.exp(problem.log_time)[:, None]
    weights = np.ones(len(relative))
    theta = np.zeros(design.shape[1])
    for _ in range(_ROUNDS):
        scaled = relative * weights[:, None]
        normal = scaled.T @ relative
        ridge = 1e-9 * max(float(np.trace(normal)), 1e-300)
        theta = nonnegative_solution(normal + ridge * np.eye(len(theta)), scaled.sum(axis=0))
        weights = 1.0 / np.maximum(np.abs(relative @ theta - 1.0), 0.02)
    return theta


def nonnegative_solution(normal: FloatArray, right: FloatArray) -> FloatArray:
    """Solve normal @ x = right, dropping the most negative coefficient until none is."""
    active = np.ones(len(right), dtype=np.bool_)
    x = np.zeros(len(right))
    while active.any():
        x[:] = 0.0
        x[active] = np.linalg.solve(normal[np.ix_(active, active)], right[active])
        if x.min() >= 0.0:
            break
        active[int(np.argmin(x))] = False
    return np.maximum(x, 0.0)

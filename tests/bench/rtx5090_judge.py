"""How predictions of budgets are judged: winners, ranks, signs of the budget's effect, absolute errors.

A cell is one load and one metric; its values are means over the seeds, which are the same traffic for every budget.
So two budgets are compared seed by seed, and a difference counts when it exceeds the noise of its mean.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from rooftune.policies.request import FloatArray
from tests.bench.rtx5090_data import ADAPTIVE, METRICS, Load

# Student's t for four degrees of freedom, 95 % two-sided: five seeds.
T_95 = 2.776


@dataclass(frozen=True, eq=False)
class Cell:
    """One metric at one load: measured and predicted values (s) by budget, one per seed, in the same order."""

    load: Load
    metric: str
    measured: Mapping[int, FloatArray]
    predicted: Mapping[int, FloatArray]

    @property
    def budgets(self) -> list[int]:
        """The fixed budgets that were run."""
        return sorted(budget for budget in self.measured if budget != ADAPTIVE)

    def error(self, budget: int) -> float:
        """Predicted over measured mean, minus 1."""
        return float(self.predicted[budget].mean() / self.measured[budget].mean()) - 1.0

    def best(self, predicted: bool) -> int:
        """The fixed budget with the lowest mean."""
        values = self.predicted if predicted else self.measured
        return min(self.budgets, key=lambda budget: float(values[budget].mean()))

    def as_good(self, budget: int) -> bool:
        """Whether a budget is the measured best or no worse than it beyond the seeds' noise."""
        best = self.best(False)
        return budget == best or self.sign(budget, best) == 0

    def regret(self, budget: int) -> float:
        """How much longer a budget took than the best one (fraction)."""
        return float(self.measured[budget].mean() / self.measured[self.best(False)].mean()) - 1.0

    def sign(self, one: int, other: int) -> int:
        """1 when ``one`` measured longer than ``other``, -1 when shorter, 0 within the seeds' noise."""
        difference = self.measured[one] - self.measured[other]
        noise = T_95 * difference.std(ddof=1) / np.sqrt(len(difference))
        mean = float(difference.mean())
        return 0 if abs(mean) <= noise else int(np.sign(mean))

    def predicted_sign(self, one: int, other: int) -> int:
        return int(np.sign(self.predicted[one].mean() - self.predicted[other].mean()))

    def rank_correlation(self) -> float:
        """Spearman's, of the budgets by their means."""
        ranks = [
            np.argsort(np.argsort([float(values[budget].mean()) for budget in self.budgets])).astype(float)
            for values in (self.measured, self.predicted)
        ]
        return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def cells_of(values: Mapping[tuple[Load, int], tuple[FloatArray, FloatArray]]) -> Iterator[Cell]:
    """Cells from (measured, predicted) arrays of shape (seeds, METRICS) by load and budget."""
    for load in sorted({load for load, _ in values}):
        budgets = [budget for other, budget in values if other == load]
        for column, metric in enumerate(METRICS):
            by = {budget: [each[:, column] for each in values[load, budget]] for budget in budgets}
            yield Cell(load, metric, {b: by[b][0] for b in budgets}, {b: by[b][1] for b in budgets})


def signs(cells: Iterable[Cell], one: int, other: int) -> tuple[int, int]:
    """Of the cells where two settings differ beyond the noise: the number of wrong signs, and of all cells."""
    judged = [cell for cell in cells if cell.sign(one, other) != 0]
    return sum(cell.sign(one, other) != cell.predicted_sign(one, other) for cell in judged), len(judged)


def flip_rate(cells: Iterable[Cell], one: int, other: int, predicted: bool) -> float:
    """The busy-phase rate (requests/s) at which ``one`` turns from shorter to longer: halfway between two loads.

    0 when it is longer at every load, inf when at none; the last change counts.
    """
    ordered = sorted(cells, key=lambda cell: cell.load.rate_rps)
    longer = []
    for cell in ordered:
        values = cell.predicted if predicted else cell.measured
        longer.append(bool(values[one].mean() > values[other].mean()))
    shorter = [place for place, is_longer in enumerate(longer) if not is_longer]
    if not shorter:
        return 0.0
    last = shorter[-1]
    if last == len(ordered) - 1:
        return float("inf")
    return 0.5 * (ordered[last].load.rate_rps + ordered[last + 1].load.rate_rps)

"""The bench ``knee-fit`` in its short form meets what the long one promises (its wall time is not judged here)."""

import pytest

from rooftune.tuner.bench.knee_fit import bench


@pytest.mark.slow
def test_short_bench_meets_its_aims() -> None:
    figures = {figure.name: figure for figure in bench(True)}
    assert list(figures) == ["knee_error_median", "knee_error_p90", "knee_error_p90_over_bound", "coverage", "fit_ms"]
    assert figures["knee_error_median"].value <= 0.03
    assert figures["knee_error_p90_over_bound"].value <= 1.3
    assert figures["coverage"].value >= 0.9

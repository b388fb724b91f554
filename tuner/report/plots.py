"""Pictures drawn with matplotlib, as SVG that is the same for the same data. The one file that imports it."""

import io
import itertools
import math
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from rooftune.policies.step_time import StepModel, step_time
from rooftune.tuner.files import write_whole
from rooftune.tuner.model.roofline import Interval
from rooftune.tuner.model.samples import FloatArray, StepSamples

_MAX_POINTS = 3000
_MEASURED = "#8a8f98"
_MODEL = "#1f5fbf"
_KNEE = "#c2571a"


def step_time_plot(path: str | Path, samples: StepSamples, model: StepModel, knee: Interval | None = None) -> None:
    """Write measured and predicted step time (ms, log) against computed tokens (log) to an SVG file.

    knee: shaded when it is bounded on both sides, in tokens. Raises what ``write_whole`` raises.
    """
    with mpl.rc_context({"svg.hashsalt": "rooftune", "svg.fonttype": "none", "font.size": 10.0}):
        figure = Figure(figsize=(7.0, 4.2), layout="constrained")
        axes = figure.add_subplot()
        shown = samples.select(np.arange(0, len(samples), max(1, math.ceil(len(samples) / _MAX_POINTS))))
        tokens = shown.computed_tokens
        axes.scatter(tokens, 1000.0 * shown.duration_s, s=6, color=_MEASURED, alpha=0.5, linewidths=0, label="measured")
        grid, low_ms, high_ms = _band(model, samples)
        axes.fill_between(grid, low_ms, high_ms, color=_MODEL, alpha=0.2, linewidth=0)
        axes.plot(grid, np.sqrt(low_ms * high_ms), color=_MODEL, label="model, least to most context seen")
        if knee is not None and knee.bounded:
            axes.axvspan(knee.low, knee.high, color=_KNEE, alpha=0.3, linewidth=0, label="knee (95 % interval)")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("computed tokens per step")
        axes.set_ylabel("step time (ms)")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.legend(loc="upper left", frameon=False)
        picture = io.BytesIO()
        figure.savefig(picture, format="svg", metadata={"Date": None, "Creator": "rooftune"})
    write_whole(path, picture.getvalue())


def _band(model: StepModel, samples: StepSamples) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Token grid, and predicted ms with the 5 % and 95 % quantile of context, requests and attention work near it."""
    tokens = samples.computed_tokens
    edges = np.geomspace(tokens.min(), tokens.max() * (1 + 1e-9) + 1e-9, 41)
    grid: list[float] = []
    low_ms: list[float] = []
    high_ms: list[float] = []
    for left, right in itertools.pairwise(edges):
        near = (tokens >= left) & (tokens <= right)
        if not near.any():
            continue
        middle = float(np.median(tokens[near]))
        grid.append(middle)
        for q, out in ((0.05, low_ms), (0.95, high_ms)):
            parts = (samples.sequences, samples.context_tokens, samples.attention_work)
            seen = [float(np.quantile(part[near], q)) for part in parts]
            out.append(1000.0 * step_time(model, middle, *seen))
    return np.array(grid), np.array(low_ms), np.array(high_ms)

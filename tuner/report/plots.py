"""The picture that ``rooftune fit --plot`` writes: measured and predicted step times, as a file of its own."""

import itertools
import math
from pathlib import Path

import numpy as np

from rooftune.policies.step_time import StepModel, step_time
from rooftune.tuner.files import write_whole
from rooftune.tuner.model.roofline import Interval
from rooftune.tuner.model.samples import FloatArray, StepSamples
from rooftune.tuner.report.svg import Axis, Plot

_MAX_POINTS = 1000
# The report's page styles its plots; a file of its own brings what it needs.
_STYLE = """<style>
svg { background: #fff; font: 12px sans-serif; }
.frame { fill: none; stroke: #8a8f98; } .grid { stroke: #e3e5e8; }
.line { fill: none; stroke-width: 2; } .model { stroke: #1f5fbf; } .range { stroke: #1f5fbf; stroke-dasharray: 4 3; }
.measured { fill: #8a8f98; fill-opacity: 0.5; } .knee { fill: #c2571a; fill-opacity: 0.3; }
.word { fill: #c2571a; }
</style>"""


def step_time_plot(path: str | Path, samples: StepSamples, model: StepModel, knee: Interval | None = None) -> None:
    """Write measured and predicted step time (ms, log) against computed tokens (log) to an SVG file.

    The lines are the model at the least and the most context seen near that size, and between the two. knee: shaded
    when it is bounded on both sides, in tokens. Raises what ``write_whole`` raises.
    """
    shown = samples.select(np.arange(0, len(samples), max(1, math.ceil(len(samples) / _MAX_POINTS))))
    tokens, measured_ms = shown.computed_tokens, 1000.0 * shown.duration_s
    grid, low_ms, high_ms = _band(model, samples)
    times_ms = np.concatenate([measured_ms, low_ms, high_ms])
    plot = Plot(
        "steps",
        "Step time against computed tokens",
        "Dots: measured steps. Lines: the fitted model. Shaded: the knee's 95 % interval, where there is one.",
        Axis("computed tokens per step", 0.8 * float(tokens.min()), 1.25 * float(tokens.max()), "log2"),
        Axis("step time (ms)", 0.8 * float(times_ms.min()), 1.25 * float(times_ms.max()), "log10"),
    )
    if knee is not None and knee.bounded:
        plot.band(knee.low, knee.high, "knee")
        plot.text(plot.px(knee.low), plot.py(plot.y.high) - 6, "knee (95 % interval)", "")
    plot.dots([(float(x), float(y)) for x, y in zip(tokens, measured_ms, strict=True)], "measured", radius=2.0)
    for values_ms, style in ((low_ms, "range"), (high_ms, "range"), (np.sqrt(low_ms * high_ms), "model")):
        plot.line([(float(x), float(y)) for x, y in zip(grid, values_ms, strict=True)], style)
    drawn = plot.svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    write_whole(path, drawn.replace("</svg>", f"{_STYLE}</svg>").encode())


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

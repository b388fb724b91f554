"""A step model from a card's layer profile: times of whole steps from the kernel times of one layer.

Dense kernels depend on the tokens of a step, output kernels on its requests, attention on four things at once: prompt
tokens, the KV entries before them, decodes and the KV entries of each. Kernels run one after another, so times add up:
each layer's once per layer of the model; embedding, final norm and output once. Nothing is fitted here, except
the formula beside the tables (for the knee and for budget policies).
"""

import csv
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rooftune.policies.errors import InputError, bad_value
from rooftune.policies.step_time import (
    NAMED_MODELS,
    AttentionTable,
    FloatArray,
    StepCost,
    chunk_attention_work,
    step_cost,
)
from rooftune.tuner.files import read_text
from rooftune.tuner.model.fit import fit_steps
from rooftune.tuner.model.roofline import StepFit, mape
from rooftune.tuner.model.samples import StepSamples

_WANTED = "a layer profile as it was written: a folder with dense.csv, per_sequence.csv and attention.csv"
MAX_TIME_US = 1e8
MAX_SHAPE = 1e7
ATTENTION_COLUMNS = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")

Curve = tuple[FloatArray, FloatArray]


def read_curves(path: Path, by: str) -> dict[str, Curve]:
    """Layer -> (sizes ascending, times in microseconds). Raises InputError naming file, line and value."""
    points: dict[str, dict[float, float]] = {}
    for where, row in rows_of(path, ("layer", by, "time_us")):
        size = number_within(row[by], f"{where}: {by}", 1.0, MAX_SHAPE)
        layer = points.setdefault(row["layer"], {})
        if size in layer:
            raise bad_value(f"{where}: {by} of {row['layer']}", size, "given once", "remove the double line")
        layer[size] = number_within(row["time_us"], f"{where}: time_us", 0.0, MAX_TIME_US)
    curves = {}
    for name, times in points.items():
        sizes = sorted(times)
        curves[name] = (np.array(sizes), np.array([times[size] for size in sizes]))
    return curves


def read_attention(path: Path) -> tuple[FloatArray, FloatArray]:
    """Shapes, (n, 4) in the order of ``ATTENTION_COLUMNS``, and times in microseconds, (n,)."""
    shapes, times = [], []
    for where, row in rows_of(path, (*ATTENTION_COLUMNS, "time_us")):
        shapes.append([number_within(row[name], f"{where}: {name}", 0.0, MAX_SHAPE) for name in ATTENTION_COLUMNS])
        times.append(number_within(row["time_us"], f"{where}: time_us", 0.0, MAX_TIME_US))
    return np.array(shapes, dtype=np.float64).reshape(-1, 4), np.array(times, dtype=np.float64)


def read_graph_sizes(path: Path) -> tuple[int, ...]:
    """Token counts to which CUDA graphs pad a step, from meta.json; none when the file or the entry is absent."""
    if not path.is_file():
        return ()
    document = read_json(path)
    for name in ("resolved_config", "compilation_config", "cudagraph_capture_sizes"):
        if not isinstance(document, dict) or name not in document:
            return ()
        document = document[name]
    sizes = document if isinstance(document, list) else None
    if sizes is None or not all(isinstance(size, int) and 1 <= size <= MAX_SHAPE for size in sizes):
        raise bad_value(f"{path}: cudagraph_capture_sizes", document, "a list of token counts", "correct the file")
    return tuple(sorted(set(sizes)))


def read_json(path: Path) -> Any:
    """A JSON document. Raises InputError when it cannot be read."""
    try:
        return json.loads(read_text(path, _WANTED))
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"{path} is not JSON: {error}; give {_WANTED}") from error


def rows_of(path: Path, columns: tuple[str, ...]) -> list[tuple[str, dict[str, str]]]:
    """Every line of a CSV file with where it stands. The head must hold the columns, others are ignored.

    Raises InputError.
    """
    if not path.is_file():
        raise InputError(f"{path} is no file; give {_WANTED}")
    lines = read_text(path, _WANTED).splitlines()
    head = lines[0].split(",") if lines else []
    missing = [name for name in columns if name not in head]
    if missing:
        raise InputError(f"{path} has no column {missing[0]}; its head must hold {','.join(columns)}")
    found = []
    for number, cells in enumerate(csv.reader(lines[1:]), start=2):
        if len(cells) != len(head):
            raise bad_value(f"{path} line {number}: fields", len(cells), str(len(head)), "correct the line")
        found.append((f"{path} line {number}", dict(zip(head, cells, strict=True))))
    if not found:
        raise InputError(f"{path} holds no rows; give {_WANTED}")
    return found


def number_within(text: str, what: str, low: float, high: float) -> float:
    """Raises InputError that names ``what``."""
    try:
        value = float(text)
    except ValueError as error:
        raise bad_value(what, text, "a number", "correct the line") from error
    if not (math.isfinite(value) and low <= value <= high):
        raise bad_value(what, value, f"within {low:g}..{high:g}", "correct the line")
    return value


# Calls of each kernel in one layer of a decoder with a dense feed-forward part; both norms of a layer share a name.
_IN_EVERY_LAYER = {
    "layernorm": 2,
    "qkv_proj": 1,
    "qk_norm": 1,
    "rotary_emb": 1,
    "o_proj": 1,
    "gate_up_proj": 1,
    "act_fn": 1,
    "down_proj": 1,
}
_ONCE = ("embedding", "final_layernorm")
_OPTIONAL = ("qk_norm",)
_OUTPUT = ("lm_head", "sampler")
MAX_LAYERS = 1_000
FIT_STEPS = 2_000
JUDGED_STEPS = 1_000
_US = 1e-6


@dataclass(frozen=True)
class LayerProfile:
    """Whole steps assembled from one layer's times.

    cost: tables for the twin, with the fitted formula. fit: that formula, its intervals and its knee; steps: made
    from the tables, what it was fitted to. formula_mape: its error on other such steps (fraction). layers: of the
    model. graph_sizes: token counts to which the engine pads a step, empty for none. max_tokens: largest step profiled.
    """

    cost: StepCost
    fit: StepFit
    steps: StepSamples
    formula_mape: float
    layers: int
    graph_sizes: tuple[int, ...]
    max_tokens: int


def read_profile(folder: str | Path, layers: int) -> LayerProfile:
    """Read a profile folder for a model of ``layers`` layers.

    Steps of up to the largest size in meta.json's capture sizes are padded to these, as CUDA graphs do; without that
    file nothing is padded. Raises InputError for a file that is absent, damaged, or does not hold a full grid.
    """
    if not 1 <= layers <= MAX_LAYERS:
        raise bad_value("layers", layers, f"within 1..{MAX_LAYERS}", "give the model's num_hidden_layers")
    where = Path(folder)
    sizes = read_graph_sizes(where / "meta.json")
    calls = {name: layers * times for name, times in _IN_EVERY_LAYER.items()} | dict.fromkeys(_ONCE, 1)
    base_s = _padded(_sum_s(where / "dense.csv", "tokens", calls), sizes)
    sequences_s = _sum_s(where / "per_sequence.csv", "sequences", dict.fromkeys(_OUTPUT, 1))
    attention = attention_table(*read_attention(where / "attention.csv"), layers, str(where / "attention.csv"))
    bare = StepCost(NAMED_MODELS["8b-2tbs"], base_s, sequences_s, 0.0, 0.0, 0.0, 0.0, attention)
    steps = steps_of(bare, FIT_STEPS, 0)
    fit = fit_steps(steps)
    other = steps_of(bare, JUDGED_STEPS, 1)
    cost = bare._replace(formula=fit.model)
    return LayerProfile(cost, fit, steps, mape(fit.model, other), layers, sizes, len(base_s) - 1)


def _sum_s(path: Path, by: str, calls: Mapping[str, int]) -> FloatArray:
    """Seconds of all kernels of a file together, each as often as it is called in a step, by size, index 0 unused."""
    curves, needed = read_curves(path, by), sorted(set(calls) - set(_OPTIONAL))
    for name in sorted(set(curves) - set(calls)):
        raise bad_value(f"{path}: layer", name, f"one of {sorted(calls)}", "only dense decoders are understood")
    for name in needed:
        if name not in curves:
            raise InputError(f"{path} has no layer {name}; a profile must hold {', '.join(needed)}")
    most = int(min(sizes[-1] for sizes, _ in curves.values()))
    size = np.maximum(np.arange(most + 1), 1)
    total = np.zeros(most + 1)
    for name, (sizes, times) in curves.items():
        total += calls[name] * _US * np.interp(size, sizes, times)
    return total


def _padded(base_s: FloatArray, graph_sizes: tuple[int, ...]) -> FloatArray:
    """Steps take what the next larger graph takes, where there is one."""
    tokens = np.maximum(np.arange(len(base_s)), 1)
    graphs = np.array([size for size in graph_sizes if size < len(base_s)], dtype=np.int64)
    if len(graphs):
        place = np.searchsorted(graphs, tokens)
        tokens = np.where(place < len(graphs), graphs[np.minimum(place, len(graphs) - 1)], tokens)
    return base_s[tokens]


def attention_table(shapes: FloatArray, times_us: FloatArray, layers: int, what: str) -> AttentionTable:
    """The grid of all layers together (s), filled where a profiler leaves cells out.

    Without decodes their context does not matter; without a prompt neither does its prefix. Decodes with no context
    cost the same as at the smallest measured. Missing large decode counts are continued along a line. A step of several
    short chunks has less work than one long chunk: the grid is continued to the work of infinitely short ones.
    """
    axes = [np.unique(column) for column in shapes.T]
    for name, axis in zip(ATTENTION_COLUMNS, axes, strict=True):
        if len(axis) < 3 or axis[0] != 0.0:
            raise bad_value(f"{what}: values of {name}", axis.tolist()[:5], "0 and at least two more", "profile again")
    grid = np.full(tuple(len(axis) for axis in axes), np.nan)
    grid[tuple(np.searchsorted(axis, column) for axis, column in zip(axes, shapes.T, strict=True))] = times_us
    grid[:, :, 0, 1:] = grid[:, :, 0, :1]
    grid[:, :, 1:, 0] = grid[:, :, 1:, 1]
    grid[0, :, :, :] = grid[0, :1, :, :]
    grid[0, :, 0, :] = 0.0
    _continue_decodes(grid, axes[2])
    if np.isnan(grid).any():
        hole = [float(axis[place]) for axis, place in zip(axes, np.argwhere(np.isnan(grid))[0], strict=True)]
        raise bad_value(f"{what}: missing shape", hole, f"measured ({', '.join(ATTENTION_COLUMNS)})", "profile again")
    prior, grid = _below_no_prefix(grid, axes[1], float(axes[0][-1]))
    return AttentionTable(axes[0], prior, axes[2], axes[3], np.ascontiguousarray(grid * (_US * layers)))


def _continue_decodes(grid: FloatArray, decodes: FloatArray) -> None:
    """Fill missing cells along the decodes from the two before them."""
    for place in range(2, len(decodes)):
        slope = (grid[:, :, place - 1] - grid[:, :, place - 2]) / (decodes[place - 1] - decodes[place - 2])
        line = grid[:, :, place - 1] + slope * (decodes[place] - decodes[place - 1])
        missing = np.isnan(grid[:, :, place])
        grid[:, :, place][missing] = line[missing]


def _below_no_prefix(grid: FloatArray, prior: FloatArray, most_tokens: float) -> tuple[FloatArray, FloatArray]:
    """One more point below no prefix, by the slope over an equally long prefix (short ones are lost in noise)."""
    reach = max(most_tokens / 2.0, 1.0)
    over = max(int(np.searchsorted(prior, reach)), 1)
    over = min(over, len(prior) - 1)
    slope = (grid[:, over] - grid[:, 0]) / prior[over]
    low = grid[:, :1] - reach * slope[:, None]
    low[0] = grid[0, :1]
    return np.concatenate([[-reach], prior]), np.concatenate([low, grid], axis=1)


def steps_of(cost: StepCost, count: int, seed: int) -> StepSamples:
    """Steps as engines run them, priced by the tables: decodes, chunks and both, spread evenly over their logs."""
    rng = np.random.default_rng(seed)
    most_tokens, most_decodes = len(cost.base_s) - 1, max(len(cost.sequences_s) - 2, 1)
    rows = []
    for _ in range(count):
        decodes = _log_uniform(rng, 1, min(most_decodes, most_tokens)) if rng.random() < 0.8 else 0
        room = most_tokens - decodes
        prefill = _log_uniform(rng, 1, room) if room > 0 and (decodes == 0 or rng.random() < 0.6) else 0
        context = float(decodes * _log_uniform(rng, 16, 4096))
        prior = float(_log_uniform(rng, 16, 8192)) if prefill > 0 and rng.random() < 0.5 else 0.0
        work = chunk_attention_work(float(prefill), prior)
        sequences = decodes + (prefill > 0)
        duration = step_cost(cost, decodes + prefill, sequences, decodes, context, prior, work)
        rows.append((duration, prefill, decodes, sequences, context, prior, work))
    return StepSamples(*np.array(rows, dtype=np.float64).T)


def _log_uniform(rng: np.random.Generator, low: int, high: int) -> int:
    return min(int(math.exp(rng.uniform(math.log(low), math.log(high + 1)))), high)

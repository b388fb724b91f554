"""The files of a layer profile: kernel times of one layer by shape, as written by vLLM layer profilers.

dense.csv         layer,tokens,time_us           times of one call, by tokens in the step
per_sequence.csv  layer,sequences,time_us        lm_head and sampler, by requests in the step
attention.csv     prefill_chunk,kv_prefill,n_decode,kv_decode,time_us
meta.json         optional; compilation_config.cudagraph_capture_sizes of a serving run on that card
"""

import csv
import json
import math
from pathlib import Path

import numpy as np
from rooftune.policies.errors import InputError, bad_value
from rooftune.policies.step_time import FloatArray

MAX_FILE_BYTES = 32_000_000
MAX_TIME_US = 1e8
MAX_SHAPE = 1e7
ATTENTION_COLUMNS = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")

Curve = tuple[FloatArray, FloatArray]


def read_curves(path: Path, by: str) -> dict[str, Curve]:
    """Layer -> (sizes ascending, times in microseconds). Raises InputError naming file, line and value."""
    points: dict[str, dict[float, float]] = {}
    for where, row in _rows(path, ("layer", by, "time_us")):
        size = _number(row[by], f"{where}: {by}", 1.0, MAX_SHAPE)
        layer = points.setdefault(row["layer"], {})
        if size in layer:
            raise bad_value(f"{where}: {by} of {row['layer']}", size, "given once", "remove the double line")
        layer[size] = _number(row["time_us"], f"{where}: time_us", 0.0, MAX_TIME_US)
    curves = {}
    for name, times in points.items():
        sizes = sorted(times)
        curves[name] = (np.array(sizes), np.array([times[size] for size in sizes]))
    return curves


def read_attention(path: Path) -> tuple[FloatArray, FloatArray]:
    """Shapes, (n, 4) in the order of ``ATTENTION_COLUMNS``, and times in microseconds, (n,)."""
    shapes, times = [], []
    for where, row in _rows(path, (*ATTENTION_COLUMNS, "time_us")):
        shapes.append([_number(row[name], f"{where}: {name}", 0.0, MAX_SHAPE) for name in ATTENTION_COLUMNS])
        times.append(_number(row["time_us"], f"{where}: time_us", 0.0, MAX_TIME_US))
    return np.array(shapes, dtype=np.float64).reshape(-1, 4), np.array(times, dtype=np.float64)


def read_batches(path: Path) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Whole batches: tokens, requests and seconds of each, shape (n,), from batch_num_tokens, batch_size and time."""
    rows = []
    for where, row in _rows(path, ("batch_num_tokens", "batch_size", "batch_execution_time")):
        tokens = _number(row["batch_num_tokens"], f"{where}: batch_num_tokens", 1.0, MAX_SHAPE)
        requests = _number(row["batch_size"], f"{where}: batch_size", 1.0, tokens)
        seconds = _number(row["batch_execution_time"], f"{where}: batch_execution_time", 1e-9, MAX_TIME_US * 1e-6)
        rows.append((tokens, requests, seconds))
    tokens_of, requests_of, seconds_of = np.array(rows, dtype=np.float64).T
    return tokens_of, requests_of, seconds_of


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


def read_json(path: Path) -> object:
    """A JSON document. Raises InputError when it cannot be read."""
    document: object
    try:
        document = json.loads(_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"{path} is not JSON: {error}; give the profile as it was written") from error
    return document


def _rows(path: Path, columns: tuple[str, ...]) -> list[tuple[str, dict[str, str]]]:
    """Every line with where it stands. The head must hold the columns, others are ignored."""
    lines = _text(path).splitlines()
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
        raise InputError(f"{path} holds no rows; give the profile as it was written")
    return found


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise bad_value(f"{path}: bytes", path.stat().st_size, f"at most {MAX_FILE_BYTES}", "give a layer profile")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(
            f"{path} cannot be read: {why}; a layer profile is a folder with dense.csv, per_sequence.csv "
            "and attention.csv"
        ) from error


def _number(text: str, what: str, low: float, high: float) -> float:
    try:
        value = float(text)
    except ValueError as error:
        raise bad_value(what, text, "a number", "correct the line") from error
    if not (math.isfinite(value) and low <= value <= high):
        raise bad_value(what, value, f"within {low:g}..{high:g}", "correct the line")
    return value

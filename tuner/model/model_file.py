"""The step-model file (model.json): what ``rooftune fit --out`` writes and ``--step-model`` reads.

One JSON object with ``schema`` and ``version``; the coefficients stand under ``model``, everything else
says where they came from and how far to trust them. Measured tables that price steps better than the formula stand
under ``tables`` (since version 2; a file of version 1 has none and still loads). Unknown keys at the top are errors,
so that a typo or a file of a later version never half-loads.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rooftune.policies.errors import InputError, bad_value
from rooftune.policies.step_time import NAMED_MODELS, NO_ATTENTION, AttentionTable, FloatArray, StepCost, StepModel
from rooftune.tuner.files import write_whole

MAX_STEP_S = 3600.0
MAX_ENTRIES = 300_000
_PRICES = ("sequence_s", "kv_decode_s", "kv_prefill_s", "attention_s")
_AXES = ("prefill_tokens", "prior_tokens", "decodes", "decode_context")
_KEYS = {"base_s", "sequences_s", "attention", *_PRICES}


def tables_document(cost: StepCost) -> dict[str, object]:
    """The tables of a StepCost as plain lists; its formula stands elsewhere in the file."""
    document: dict[str, object] = {name: getattr(cost, name) for name in _PRICES}
    document["base_s"] = cost.base_s.tolist()
    document["sequences_s"] = cost.sequences_s.tolist()
    if len(cost.attention.prefill_tokens):
        document["attention"] = {name: getattr(cost.attention, name).tolist() for name in (*_AXES, "time_s")}
    return document


def parse_tables(raw: object, formula: StepModel, what: str) -> StepCost:
    """Tables from plain lists. Raises InputError that names ``what``, the entry and the bound."""
    if not isinstance(raw, dict) or not set(raw) <= _KEYS or not {"base_s", *_PRICES} <= set(raw):
        raise InputError(f"{what}: tables must hold base_s and {', '.join(_PRICES)}, and only {sorted(_KEYS)}")
    sequence_s, decode_s, prefill_s, work_s = (float(_numbers(raw[name], (), f"{what}: {name}")) for name in _PRICES)
    base_s = _numbers(raw["base_s"], (None,), f"{what}: base_s")
    if len(base_s) < 2 or not np.all(base_s[1:] > 0.0):
        shown = base_s.tolist()[:4]
        raise bad_value(f"{what}: base_s", shown, "at least 2 entries, from the second on above 0", "fit it again")
    sequences_s = _numbers(raw.get("sequences_s", []), (None,), f"{what}: sequences_s")
    attention = parse_attention(raw["attention"], what) if "attention" in raw else NO_ATTENTION
    return StepCost(formula, base_s, sequences_s, sequence_s, decode_s, prefill_s, work_s, attention)


def parse_attention(raw: object, what: str) -> AttentionTable:
    """An attention table from plain lists; checked by ``check_attention``."""
    if not isinstance(raw, dict) or set(raw) != {*_AXES, "time_s"}:
        raise InputError(f"{what}: attention must hold exactly {', '.join(_AXES)} and time_s; fit the model again")
    chunk, prior, decodes, context = (
        _numbers(raw[name], (None,), f"{what}: attention.{name}", low=-1e9, high=1e9) for name in _AXES
    )
    shape = (len(chunk), len(prior), len(decodes), len(context))
    # Below the shortest prefix seen the grid is continued by a line, which may cross 0; the price of a step may not.
    times = _numbers(raw["time_s"], shape, f"{what}: attention.time_s", low=-MAX_STEP_S)
    return check_attention(AttentionTable(chunk, prior, decodes, context, times.reshape(shape)), what)


def check_attention(table: AttentionTable, what: str) -> AttentionTable:
    """Return the table, or raise InputError for axes that do not ascend or have fewer than two points."""
    for name in _AXES:
        axis = getattr(table, name)
        if len(axis) < 2 or not np.all(np.diff(axis) > 0.0):
            raise bad_value(
                f"{what}: attention.{name}", axis.tolist()[:4], "at least 2 ascending points", "fit it again"
            )
    return table


def _numbers(
    raw: object, shape: tuple[int | None, ...], what: str, *, low: float = 0.0, high: float = MAX_STEP_S
) -> FloatArray:
    """Finite numbers within low..high in an array of this shape (None: any length)."""
    try:
        array = np.array(raw, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise bad_value(what, _short(raw), "numbers in rows of equal length", "fit the model again") from error
    fits = array.ndim == len(shape) and all(w is None or w == g for w, g in zip(shape, array.shape, strict=True))
    if not fits or array.size > MAX_ENTRIES or _has_other_types(raw):
        raise bad_value(what, _short(raw), f"numbers of shape {shape}, at most {MAX_ENTRIES}", "fit the model again")
    good = np.isfinite(array) & (array >= low) & (array <= high)
    if not good.all():
        value = float(array[~good].flat[0])
        raise bad_value(what, value, f"finite, within {low:g}..{high:g}", "check the unit (seconds)")
    return array


def _has_other_types(raw: object) -> bool:
    """True for text or booleans, which numpy would turn into numbers."""
    if isinstance(raw, list):
        return any(_has_other_types(item) for item in raw)
    return isinstance(raw, bool) or not isinstance(raw, (int, float))


def _short(raw: object) -> str:
    text = repr(raw)
    return text if len(text) <= 60 else text[:57] + "..."


SCHEMA = "rooftune.step-model"
VERSION = 2
READABLE = (1, 2)
MAX_FILE_BYTES = 8_000_000
MAX_SOURCE_CHARACTERS = 2000  # as in a report
# A second per token, per sequence or per step is far beyond any engine; larger values are a wrong unit.
MAX_COEFFICIENT_S = 1000.0

_TOP_KEYS = {"schema", "version", "model", "source", "intervals", "codes", "errors", "tables"}


@dataclass(frozen=True)
class ModelFile:
    """Contents of one model.json.

    source: where the steps came from, in words.
    intervals: quantity -> (low, high) with the unit in the name; ``math.inf`` where nothing bounds it.
    codes: identifiability findings, see ``rooftune.tuner.model.roofline.FitCode``.
    errors: name -> fraction (``held_out_mape`` and the like).
    cost: measured tables with ``model`` as their formula; None where the formula is all there is.
    """

    model: StepModel
    source: str = ""
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    codes: tuple[str, ...] = ()
    errors: Mapping[str, float] = field(default_factory=dict)
    cost: StepCost | None = None


def check_step_model(model: StepModel, what: str) -> StepModel:
    """Return the model, or raise InputError for a coefficient that no engine can have."""
    for name, value in model._asdict().items():
        if name == "sharpness":
            if not math.isfinite(value) or (value != 0.0 and value < 1.0):
                raise bad_value(f"{what}: sharpness", value, "0 (hard maximum) or at least 1", "fit the model again")
        elif not math.isfinite(value) or not 0.0 <= value <= MAX_COEFFICIENT_S:
            raise bad_value(f"{what}: {name}", value, f"within 0..{MAX_COEFFICIENT_S:g} s", "check the unit (seconds)")
    if model.overhead_s + model.floor_s + model.slope_s_per_token + model.sequence_s <= 0.0:
        raise InputError(f"{what}: every step would take no time; fit the model again")
    return model


def load_step_model(name_or_path: str) -> StepModel | StepCost:
    """Coefficients of a named constant set, or what a model.json holds: its tables where there are any.

    Raises InputError when the name is unknown (the message lists the names) or the file is not usable.
    """
    if name_or_path in NAMED_MODELS:
        return NAMED_MODELS[name_or_path]
    if not os.path.isfile(name_or_path):  # false, too, for a name that is too long for a file
        names = ", ".join(sorted(NAMED_MODELS))
        raise InputError(
            f"step model {name_or_path!r} is neither a file nor one of the names {names}; "
            "give one of these or a file written by `rooftune fit --out`"
        )
    contents = read_model_file(Path(name_or_path))
    return contents.model if contents.cost is None else contents.cost


def read_model_file(path: Path) -> ModelFile:
    """Read and check model.json. Raises InputError that names the file, the value and the bound."""
    what = f"step model {path}"
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise bad_value(f"{what}: bytes", path.stat().st_size, f"at most {MAX_FILE_BYTES}", "give a model.json")
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # ValueError: no text, no JSON, a number without end
        why = getattr(error, "strerror", None) or error
        raise InputError(f"{what} cannot be read: {why}; give a file written by `rooftune fit --out`") from error
    if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
        raise InputError(f'{what} has no "schema": "{SCHEMA}"; give a file written by `rooftune fit --out`')
    version = raw.get("version")
    if isinstance(version, bool) or version not in READABLE:
        raise bad_value(f"{what}: version", version, f"one of {READABLE}", "fit the model again with this release")
    unknown = sorted(set(raw) - _TOP_KEYS)
    if unknown:
        raise bad_value(f"{what}: key", unknown[0], f"one of {sorted(_TOP_KEYS)}", "remove it")
    if version == 1 and "tables" in raw:
        raise bad_value(f"{what}: key", "tables", "absent in version 1", "fit the model again with this release")
    model = check_step_model(_parse_model(raw.get("model"), what), what)
    return ModelFile(
        model=model,
        source=_parse_source(raw.get("source", ""), what),
        intervals=_parse_intervals(raw.get("intervals", {}), what),
        codes=_parse_codes(raw.get("codes", []), what),
        errors=_parse_errors(raw.get("errors", {}), what),
        cost=parse_tables(raw["tables"], model, what) if "tables" in raw else None,
    )


def write_model_file(path: Path, contents: ModelFile) -> None:
    """Write model.json, whole or not at all. Infinite bounds are written as null: JSON has no infinity."""
    document: dict[str, object] = {
        "schema": SCHEMA,
        "version": VERSION,
        "model": contents.model._asdict(),
        "source": contents.source,
        "intervals": {k: [_finite_or_null(a), _finite_or_null(b)] for k, (a, b) in contents.intervals.items()},
        "codes": list(contents.codes),
        "errors": dict(contents.errors),
    }
    if contents.cost is not None:
        document["tables"] = tables_document(contents.cost)
    # Thousands of table entries, a line each, would be unreadable.
    indent = 2 if contents.cost is None else None
    write_whole(path, (json.dumps(document, indent=indent, allow_nan=False) + "\n").encode())


def _finite_or_null(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _number(value: object, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise bad_value(what, value, "a number", "fit the model again")
    try:
        return float(value)
    except OverflowError:
        raise bad_value(what, "above 1e308", "a number", "fit the model again") from None


def _finite(value: object, what: str) -> float:
    number = _number(value, what)
    if not math.isfinite(number):
        raise bad_value(what, number, "finite", "fit the model again")
    return number


def _parse_source(raw: object, what: str) -> str:
    if not isinstance(raw, str) or len(raw) > MAX_SOURCE_CHARACTERS:
        found = f"{len(raw)} characters" if isinstance(raw, str) else type(raw).__name__
        raise InputError(f"{what}: source is {found}, must be text of at most {MAX_SOURCE_CHARACTERS}; shorten it")
    return raw


def _parse_model(raw: object, what: str) -> StepModel:
    if not isinstance(raw, dict) or set(raw) != set(StepModel._fields):
        raise InputError(f"{what}: model must hold exactly {', '.join(StepModel._fields)}; fit the model again")
    return StepModel(**{name: _number(raw[name], f"{what}: {name}") for name in StepModel._fields})


def _parse_codes(raw: object, what: str) -> tuple[str, ...]:
    if not isinstance(raw, list) or not all(isinstance(code, str) for code in raw):
        raise bad_value(f"{what}: codes", raw, "a list of words", "fit the model again")
    return tuple(raw)


def _parse_errors(raw: object, what: str) -> dict[str, float]:
    if not isinstance(raw, dict):
        raise bad_value(f"{what}: errors", raw, "an object of numbers", "fit the model again")
    return {str(name): _finite(value, f"{what}: errors.{name}") for name, value in raw.items()}


def _parse_intervals(raw: object, what: str) -> dict[str, tuple[float, float]]:
    if not isinstance(raw, dict):
        raise InputError(f"{what}: intervals must be an object; fit the model again")
    result = {}
    for name, pair in raw.items():
        if not isinstance(pair, list) or len(pair) != 2:
            raise bad_value(f"{what}: intervals.{name}", pair, "a pair [low, high]", "fit the model again")
        low, high = (
            default if bound is None else _number(bound, f"{what}: intervals.{name}")
            for bound, default in zip(pair, (-math.inf, math.inf), strict=True)
        )
        if not low <= high:
            raise bad_value(f"{what}: intervals.{name}", pair, "low <= high", "fit the model again")
        result[str(name)] = (low, high)
    return result

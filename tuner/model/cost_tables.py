"""Measured step-time tables as JSON: what model.json holds under ``tables``, written and checked."""

import numpy as np
from rooftune.policies.errors import InputError, bad_value
from rooftune.policies.step_time import NO_ATTENTION, AttentionTable, FloatArray, StepCost, StepModel

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

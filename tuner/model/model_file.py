"""The step-model file (model.json): what ``rooftune fit --out`` writes and ``--step-model`` reads.

One JSON object with ``schema`` and ``version``; the coefficients are under ``model``, everything else
says where they came from and how far to trust them. Measured tables that price steps better than the formula are
under ``tables`` (since version 2; a file of version 1 has none and still loads). Unknown keys at the top are errors,
so that a typo or a file of a later version never half-loads.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, ValidationError, model_validator

from rooftune.policies.errors import InputError, bad_value
from rooftune.policies.step_time import NAMED_MODELS, NO_ATTENTION, AttentionTable, StepCost, StepModel
from rooftune.tuner.files import read_text, write_whole
from rooftune.tuner.record import Part, Words

SCHEMA = "rooftune.step-model"
VERSION = 2
MAX_FILE_BYTES = 8_000_000
# A second per token, per sequence or per step is far beyond any engine; larger values are a wrong unit.
MAX_COEFFICIENT_S = 1000.0
_GIVE = "give a file written by `rooftune fit --out`"
_PRICES = ("sequence_s", "kv_decode_s", "kv_prefill_s", "attention_s")
_AXES = ("prefill_tokens", "prior_tokens", "decodes", "decode_context")

_Time = Annotated[float, Field(ge=0.0, le=3600.0)]
# Below the shortest prefix seen the grid is continued by a line, which may cross 0; the price of a step may not.
_GridTime = Annotated[float, Field(ge=-3600.0, le=3600.0)]
_Axis = Annotated[tuple[Annotated[float, Field(ge=-1e9, le=1e9)], ...], Field(min_length=2)]
_Bound = float | None  # null: nothing bounds it, for JSON has no infinity


class _Attention(Part):
    """``AttentionTable`` as lists."""

    prefill_tokens: _Axis
    prior_tokens: _Axis
    decodes: _Axis
    decode_context: _Axis
    time_s: tuple[tuple[tuple[tuple[_GridTime, ...], ...], ...], ...]

    @model_validator(mode="after")
    def _grid(self) -> "_Attention":
        axes = {name: getattr(self, name) for name in _AXES}
        for name, axis in axes.items():
            if any(later <= earlier for earlier, later in pairwise(axis)):
                raise ValueError(f"{name} must ascend")
        if not _has_shape(self.time_s, shape := [len(axis) for axis in axes.values()]):
            raise ValueError(f"time_s must be of shape {shape}")
        return self

    def table(self) -> AttentionTable:
        return AttentionTable(*(np.array(getattr(self, name)) for name in (*_AXES, "time_s")))


class _Tables(Part):
    """``StepCost`` as lists, without its formula."""

    base_s: Annotated[tuple[_Time, ...], Field(min_length=2)]
    sequences_s: tuple[_Time, ...] = ()
    sequence_s: _Time
    kv_decode_s: _Time
    kv_prefill_s: _Time
    attention_s: _Time
    attention: _Attention | None = None

    @model_validator(mode="after")
    def _every_step_takes_time(self) -> "_Tables":
        if min(self.base_s[1:]) <= 0.0:
            raise ValueError("base_s must be above 0 from its second entry on")
        return self

    def cost(self, formula: StepModel) -> StepCost:
        attention = NO_ATTENTION if self.attention is None else self.attention.table()
        prices = {name: getattr(self, name) for name in _PRICES}
        return StepCost(formula, np.array(self.base_s), np.array(self.sequences_s), attention=attention, **prices)


class _Document(Part):
    """The file."""

    schema_name: Literal["rooftune.step-model"] = Field(alias="schema")
    version: Annotated[int, Field(ge=1, le=VERSION)]
    model: dict[str, float]
    source: Words = ""
    intervals: dict[str, tuple[_Bound, _Bound]] = Field(default_factory=dict)
    codes: tuple[str, ...] = ()
    errors: dict[str, float] = Field(default_factory=dict)
    tables: _Tables | None = None

    @model_validator(mode="after")
    def _consistent(self) -> "_Document":
        if set(self.model) != set(StepModel._fields):
            raise ValueError(f"model must hold exactly {', '.join(StepModel._fields)}")
        if self.version == 1 and self.tables is not None:
            raise ValueError("version 1 has no tables")
        for name, (low, high) in self.bounds().items():
            if low > high:
                raise ValueError(f"intervals.{name} is {[low, high]}, must be low <= high")
        return self

    def bounds(self) -> dict[str, tuple[float, float]]:
        """The intervals with infinity where nothing bounds them."""
        return {
            name: (-math.inf if low is None else low, math.inf if high is None else high)
            for name, (low, high) in self.intervals.items()
        }


def _has_shape(rows: Sequence[Any], shape: Sequence[int]) -> bool:
    return len(rows) == shape[0] and (len(shape) == 1 or all(_has_shape(row, shape[1:]) for row in rows))


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
    if not os.path.isfile(name_or_path):  # also false for a name that is too long for a file
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
    text = read_text(path, _GIVE.removeprefix("give "))
    if len(text) > MAX_FILE_BYTES:
        raise bad_value(f"{what}: bytes", len(text), f"at most {MAX_FILE_BYTES}", "give a model.json")
    try:
        found = _Document.model_validate_json(text)
    except ValidationError as error:
        raise _problem(error, what) from None
    model = check_step_model(StepModel(**found.model), what)
    cost = None if found.tables is None else found.tables.cost(model)
    return ModelFile(model, found.source, found.bounds(), found.codes, found.errors, cost)


def _problem(error: ValidationError, what: str) -> InputError:
    first = error.errors(include_url=False, include_context=False)[0]
    place = ".".join([what + ":", *map(str, first["loc"])]).replace(":.", ": ")
    value, problem = repr(first["input"]), first["msg"]
    if problem.startswith("Input should be "):
        return bad_value(place, value[:60], problem.removeprefix("Input should be "), _GIVE)
    return InputError(f"{place}: {problem}; {_GIVE}")


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
        document["tables"] = _tables(contents.cost)
    # Thousands of table entries, a line each, would be unreadable.
    indent = 2 if contents.cost is None else None
    write_whole(path, (json.dumps(document, indent=indent, allow_nan=False) + "\n").encode())


def _finite_or_null(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _tables(cost: StepCost) -> dict[str, object]:
    tables: dict[str, object] = {name: getattr(cost, name) for name in _PRICES}
    tables |= {"base_s": cost.base_s.tolist(), "sequences_s": cost.sequences_s.tolist()}
    if len(cost.attention.prefill_tokens):
        tables["attention"] = {name: getattr(cost.attention, name).tolist() for name in (*_AXES, "time_s")}
    return tables

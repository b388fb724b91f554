"""The input of one simulation as a file: traffic, step model, engine, setting, changes in mid-run, targets.

One JSON object, strict: an unknown key, another version or a value out of range is one line. Paths are relative to
the file. Everything but ``traffic``, ``step_model`` and ``setting`` may be left out::

    {"schema": "rooftune.simulate-input", "version": 1,
     "traffic": {"file": "trace.csv", "rate_scale": 1.8},
     "step_model": "8b-2tbs",
     "setting": {"step_tokens": 512, "chunk_cap_tokens": 128},
     "changes": [{"at_s": 600, "setting": {"step_tokens": 2048}}],
     "targets": [{"metric": "gap", "quantile": 0.99, "bound_s": 0.03}],
     "overrides": [{"when": {"tenant": "gold"}, "targets": [{"metric": "ttft", "quantile": 0.99, "bound_s": 1}]}]}
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from rooftune.policies.envelope import KNOB
from rooftune.policies.errors import InputError, bad_value
from rooftune.policies.request import Boot, Setting
from rooftune.policies.slo import Override, Slo, Target
from rooftune.tuner.files import read_text, shown_path
from rooftune.tuner.record import Part, first_problem
from rooftune.tuner.sim.engine import Engine
from rooftune.tuner.sim.twin import Change
from rooftune.tuner.traffic.reshape import scale_rate, window
from rooftune.tuner.traffic.traces import load_traffic
from rooftune.tuner.traffic.workload import Traffic

SCHEMA = "rooftune.simulate-input"
VERSION = 1

Count = Annotated[int, Field(ge=1, le=100_000_000)]


class TrafficInput(Part):
    """file: relative to the input. window_s: (start, length) in the file's time, taken before the rate is scaled."""

    file: str
    format: str = "auto"
    sort: bool = False
    window_s: tuple[float, float] | None = None
    rate_scale: float = 1.0


class EngineInput(Part):
    """What was fixed at start; tokens and requests, times in seconds."""

    ceiling_tokens: Count = 8192
    kv_tokens: Count = 600_000
    block_tokens: Count = 16
    max_seqs: Count = 256
    prefix_caching: bool = True
    chunking: bool = True
    keep_decodes_moving: bool = False
    outside_first_s: Annotated[float, Field(ge=0)] = 0.0
    outside_token_s: Annotated[float, Field(ge=0)] = 0.0

    def engine(self, traffic: Traffic) -> Engine:
        """The twin's engine for this traffic: its pool knows contents when the traffic states them."""
        contents = int(self.prefix_caching and len(traffic.prefix_offsets) > 0)
        boot = Boot(
            self.ceiling_tokens, self.block_tokens, int(self.chunking), 1, contents, int(self.keep_decodes_moving)
        )
        kv_blocks = max(self.kv_tokens // self.block_tokens, 1)
        return Engine(boot, kv_blocks, self.max_seqs, self.outside_first_s, self.outside_token_s)


class ChangeInput(Part):
    """A whole setting that holds from the first step at or after ``at_s`` on."""

    at_s: Annotated[float, Field(ge=0)]
    setting: dict[str, int | float]


class SimulateInput(Part):
    """The whole file; see the head of this module."""

    schema_name: Literal["rooftune.simulate-input"] = Field(alias="schema")
    version: Literal[1]
    traffic: TrafficInput
    step_model: str
    setting: dict[str, int | float]
    engine: EngineInput = EngineInput()
    changes: tuple[ChangeInput, ...] = ()
    targets: tuple[Target, ...] = ()
    overrides: tuple[Override, ...] = ()

    def slo(self) -> Slo:
        """The targets; without any, tokens per second is what counts. Raises InputError."""
        return Slo(self.targets, self.overrides, objective="goodput" if self.targets else "tokens_per_s")

    def settings(self) -> tuple[Setting, tuple[Change, ...]]:
        """The first setting and the changes, in order of time. Raises InputError for an unknown or invalid knob."""
        changes = tuple(Change(change.at_s, self._setting(change.setting, "changes")) for change in self.changes)
        if list(changes) != sorted(changes, key=lambda change: change.at_s):
            raise InputError("changes must stand in order of at_s; sort them")
        return self._setting(self.setting, "setting"), changes

    def _setting(self, values: dict[str, int | float], where: str) -> Setting:
        unknown = sorted(set(values) - set(Setting._fields))
        if unknown:
            raise InputError(f"{where} holds {unknown[0]!r}, must hold knobs: {', '.join(Setting._fields)}; correct it")
        if "step_tokens" not in values:
            raise InputError(f"{where} lacks step_tokens, the token budget; state it")
        for name, value in values.items():
            if value < 0 or (KNOB[name].whole and not isinstance(value, int)):
                kind = " and whole" if KNOB[name].whole else ""
                raise InputError(f"{where}: {name} is {value!r}, must be at least 0{kind}; correct it")
            if name in ("budget_floor_tokens", "pressure_tokens") and value > self.engine.ceiling_tokens:
                bound = f"at most engine.ceiling_tokens ({self.engine.ceiling_tokens})"
                raise bad_value(f"{where}: {name}", value, bound, "lower it")
        return Setting(**{"max_running": self.engine.max_seqs, **values})  # type: ignore[arg-type]  # checked above

    def load_traffic(self, beside: Path) -> Traffic:
        """The traffic, its file looked for beside the input. Raises InputError."""
        wanted = self.traffic
        traffic = load_traffic(beside / wanted.file, format=wanted.format, sort=wanted.sort)
        if wanted.window_s is not None:
            traffic = window(traffic, *wanted.window_s)
        return scale_rate(traffic, wanted.rate_scale)


def read_simulate_input(path: Path) -> SimulateInput:
    """Read and check the file. Raises InputError: one line with file, key and what is wrong with it."""
    try:
        return SimulateInput.model_validate_json(read_text(path))
    except ValidationError as error:
        raise first_problem(error, shown_path(path), "correct the simulate input") from None

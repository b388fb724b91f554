"""``Config``: everything that an operator tells the controller, as one frozen value."""

import math
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rooftune.policies.envelope import KNOB, KNOB_NAMES
from rooftune.policies.errors import InputError, shown
from rooftune.policies.guard import GuardLimits
from rooftune.policies.proof.switchback import PAIRS
from rooftune.policies.slo import PROFILES, Slo
from rooftune.policies.verify import RollbackThresholds
from rooftune.tuner.config.sections import (
    CadenceSection,
    EngineSection,
    GuardSection,
    LogSection,
    MaintenanceSection,
    RetentionSection,
    RollbackSection,
    SearchKnob,
    SearchSection,
    Section,
    TargetSection,
)
from rooftune.tuner.config.values import Line, Listen, Name, is_loopback, split_listen, wrong
from rooftune.tuner.files import at_home

Mode = Literal["shadow", "live"]
STUDIES = "studies.db"
STATE_FOLDER = "rooftune-state"


class Config(Section):
    """Targets or a profile, never both; neither is allowed in shadow mode, where nothing is proposed then.

    bounds: knob -> [least, most] in the knob's own unit; knobs: those that are searched, each inside its bounds and
    inside what the engine allows. state: a folder of this controller alone. storage: Optuna URL of the studies
    (default: studies.db in the state folder). freeze_file: while it exists a deploy runs and nothing is pushed.
    listen: HOST:PORT of the controller's own pages, null for none; beyond loopback it needs token_file.
    """

    engine: EngineSection
    mode: Mode = "shadow"
    profile: Name | None = Field(default=None, description="named targets: " + ", ".join(PROFILES))
    targets: Annotated[tuple[TargetSection, ...], Field(max_length=32)] = ()
    knobs: Annotated[tuple[SearchKnob, ...], Field(min_length=1)] = ("step_tokens", "chunk_cap_tokens")
    bounds: dict[str, tuple[int | float, int | float]] = Field(default={}, description="knob: [least, most]")
    cadence: CadenceSection = CadenceSection()
    search: SearchSection = SearchSection()
    guard: GuardSection = GuardSection()
    rollback: RollbackSection = RollbackSection()
    maintenance: MaintenanceSection = MaintenanceSection()
    freeze_file: Path | None = Field(default=None, description="while this file exists nothing is pushed")
    state: Path = Field(default=Path(STATE_FOLDER), description="folder of this controller alone")
    storage: Line | None = Field(default=None, repr=False, description="Optuna URL of the studies")
    retention: RetentionSection = RetentionSection()
    listen: Listen | None = Field(default="127.0.0.1:9109", description="HOST:PORT, null for none")
    token_file: Path | None = Field(default=None, description="who may pause, resume and revert over HTTP")
    log: LogSection = LogSection()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        self._check_targets()
        self._check_bounds()
        # A block to get there, the pairs, and a block in which the last requests end.
        verified_s = (PAIRS[-1] + 1) * self.cadence.verify_s
        if verified_s > self.guard.max_inconclusive_s:
            bound = f"at least {verified_s:g} ({PAIRS[-1] + 1} x cadence.verify_s, a whole trial)"
            remedy = "raise it, or shorten cadence.verify_s; a trial is taken back before its last look"
            raise wrong(self.guard.max_inconclusive_s, bound, remedy, "guard.max_inconclusive_s")
        if self.listen is not None and not is_loopback(split_listen(self.listen)[0]) and self.token_file is None:
            raise wrong(self.listen, "a loopback address while there is no token_file", "give token_file", "listen")
        return self

    def _check_targets(self) -> None:
        if self.profile is not None and self.profile not in PROFILES:
            raise wrong(self.profile, "one of " + ", ".join(PROFILES), "correct it, or give targets", "profile")
        if self.profile is not None and self.targets:
            raise wrong(self.profile, "left out while targets are given", "keep one of the two", "profile")
        try:
            slo = self.slo()
        except InputError as error:
            given = ", ".join(f"{one.metric} at {one.quantile:g}" for one in self.targets)
            raise wrong(given, "one bound for each metric and quantile", str(error), "targets") from None
        if self.mode == "live" and not slo.all_targets():
            if self.profile is not None:
                bound = "a profile with latency targets in live mode"
                raise wrong(self.profile, bound, "give targets, or mode: shadow", "profile")
            raise wrong(self.mode, "shadow while there are no targets", "give targets or a profile", "mode")

    def _check_bounds(self) -> None:
        if len(set(self.knobs)) != len(self.knobs):
            raise wrong(list(self.knobs), "each knob once", "drop the repeated one", "knobs")
        for name, (low, high) in self.bounds.items():
            key = f"bounds.{name}"
            if name not in KNOB_NAMES:
                raise wrong(name, "one of " + ", ".join(KNOB_NAMES), "correct the name of the knob", "bounds")
            if name not in self.knobs:
                remedy = "add it to knobs, or drop its bounds"
                raise wrong([low, high], f"for a knob that is searched ({', '.join(self.knobs)})", remedy, key)
            whole = isinstance(low, int) and isinstance(high, int)
            if KNOB[name].whole and not whole:
                raise wrong([low, high], "two whole numbers", "this knob counts; correct them", key)
            least = KNOB[name].least
            if not least <= low <= high:
                raise wrong([low, high], f"[least, most] with {least} <= least <= most", "correct them", key)

    def knob_bounds(self) -> dict[str, tuple[float, float]]:
        """Every knob that is searched, with its least and greatest value; +inf: no bound given."""
        open_bounds = {name: (float(KNOB[name].least), math.inf) for name in self.knobs}
        return open_bounds | {name: (float(low), float(high)) for name, (low, high) in self.bounds.items()}

    @property
    def storage_url(self) -> str:
        """Optuna URL of the studies."""
        return self.storage or f"sqlite:///{self.state / STUDIES}"

    def slo(self) -> Slo:
        """The targets; without any: tokens per second. Raises InputError for two bounds of one metric and quantile."""
        if self.profile is not None:
            return PROFILES[self.profile]
        if not self.targets:
            return Slo((), objective="tokens_per_s")
        return Slo(tuple(one.target() for one in self.targets))

    def limits(self) -> GuardLimits:
        """What the guard may do."""
        windows = self.maintenance
        return GuardLimits(
            **dict(self.guard), no_push=windows.spans(windows.no_push), push_only=windows.spans(windows.push_only)
        )

    def thresholds(self) -> RollbackThresholds:
        """What is never accepted after a push."""
        return RollbackThresholds(**{name: value for name, value in self.rollback if value is not None})

    def resolved(self, base: Path) -> "Config":
        """The same with every relative path counted from ``base`` and ``~`` replaced."""
        names = ("freeze_file", "state", "token_file")
        paths = {name: _resolved(base, getattr(self, name)) for name in names}
        files = {name: _resolved(base, getattr(self.engine, name)) for name in ("token_file", "ca_file")}
        engine = self.engine.model_copy(update=files)
        return self.model_copy(update={**paths, "engine": engine})

    def summary(self) -> list[str]:
        """The configuration in a few lines without secrets."""
        targets = self.profile or ", ".join(map(_shown_target, self.targets)) or "none"
        lease = f"lease {self.cadence.lease_s:g} s, cycle {self.cadence.cycle_s:g} s"
        bounds = ", ".join(f"{name} {low:g}..{high:g}" for name, (low, high) in self.bounds.items())
        return [
            f"engine {self.engine.shown_name} at {self.engine.url}, mode {self.mode}",
            f"targets: {targets}",
            f"knobs: {', '.join(self.knobs)}" + (f"; bounds: {bounds}" if bounds else ""),
            f"{lease}; state in {shown(str(self.state), 200)}; pages on {self.listen or 'no address'}",
        ]


def _shown_target(one: TargetSection) -> str:
    return f"{one.metric} p{one.quantile * 100:g} <= {one.bound}"


def _resolved(base: Path, path: Path | None) -> Path | None:
    return None if path is None else base / at_home(path)

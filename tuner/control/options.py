"""The loop's options, from the configuration, which holds all bounds and defaults."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo

from rooftune.policies.errors import bad_value
from rooftune.policies.guard import GuardLimits
from rooftune.policies.slo import Slo
from rooftune.policies.verify import RollbackThresholds
from rooftune.tuner.config import Config


@dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """Times in seconds.

    bounds: the knobs that may move, with the operator's least and greatest value. cycle_s: between two starts of a
    cycle. window_s: longest window of a search; verify_s: a pair of a trial's blocks; settle_s: time at the start of a
    block that does not count. lease_s: of every push. search_every_s: on steady traffic; a shift, or another setting
    in force, starts a search at once. search_requests: least ended requests for a search; min_requests: for a verdict.
    trials: of one search; horizon_s: how long it watches a queue. storage: Optuna
    URL for its trials (None: memory). zone: the operator's, for days and windows of the week.
    """

    live: bool
    slo: Slo
    limits: GuardLimits
    thresholds: RollbackThresholds
    bounds: Mapping[str, tuple[float, float]]
    cycle_s: float
    window_s: float
    verify_s: float
    settle_s: float
    lease_s: float
    search_every_s: float
    search_requests: int
    min_requests: int
    trials: int
    horizon_s: float
    seed: int
    storage: str | None
    zone: tzinfo


def options_of(config: Config, storage: str | None) -> LoopOptions:
    cadence = config.cadence
    return LoopOptions(
        live=config.mode == "live",
        slo=config.slo(),
        limits=config.limits(),
        thresholds=config.thresholds(),
        bounds=config.knob_bounds(),
        cycle_s=cadence.cycle_s,
        window_s=cadence.window_s,
        verify_s=cadence.verify_s,
        settle_s=cadence.settle_s,
        lease_s=cadence.lease_s,
        search_every_s=cadence.search_every_s,
        search_requests=cadence.search_requests,
        min_requests=cadence.verify_min_requests,
        trials=config.search.trials,
        horizon_s=config.search.horizon_s,
        seed=config.search.seed,
        storage=storage,
        zone=config.maintenance.zone,
    )


DAY_MINUTES = 24 * 60


def minute_of_week(wall_s: float, zone: tzinfo) -> int:
    """Minute 0..10079 of the week at ``wall_s`` (seconds since 1970) on the wall clock in ``zone``; 0: Monday 00:00.

    The hour skipped in spring does not occur and the one repeated in autumn occurs twice: windows mean the wall clock.
    """
    local = _local(wall_s, zone)
    return local.weekday() * DAY_MINUTES + local.hour * 60 + local.minute


def day(wall_s: float, zone: tzinfo) -> str:
    """The date in ``zone``, such as 2026-03-29, for daily budgets."""
    return _local(wall_s, zone).date().isoformat()


def _local(wall_s: float, zone: tzinfo) -> datetime:
    if not (math.isfinite(wall_s) and 0.0 <= wall_s < 1e11):
        raise bad_value("wall clock", wall_s, "seconds since 1970 within 0..1e11", "set the machine's clock")
    return datetime.fromtimestamp(wall_s, UTC).astimezone(zone)

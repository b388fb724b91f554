"""What may be searched: an engine's knobs, their grid, and the map between a sampler's numbers and a Setting.

``SearchSpace.draw`` asks for one number after the other, some only when an earlier choice calls for them, and
``params`` gives the numbers that lead back to a Setting. Optuna, the random baseline and warm starts all use the two.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rooftune.policies.envelope import KNOB, SEARCHED
from rooftune.policies.errors import bad_value
from rooftune.policies.request import DEADLINE, FCFS, FIXED_BUDGET, PRESSURE, SHORTEST_FIRST, STEP_TIME_TARGET, Setting
from rooftune.policies.slo import Slo
from rooftune.policies.step_time import StepModel
from rooftune.tuner.sim.engine import Engine

GRID_TOKENS = 8
MIN_CHUNK_CAP_TOKENS = 16
PARTIAL_PREFILLS = (0, 1, 2, 4, 8)
LONG_PARTIAL_PREFILLS = (0, 1, 2)
AGING_S = (5, 10, 30)
AGED_ONE_IN = (10, 20, 5, 1)  # one step in so many goes to the aged; 1: they always go first
WORK_WEIGHTS = (0, 1, 4, 16)  # seconds of waiting that outweigh a second of reading; 0: none do
TARGET_STEPS = 40  # of the grid of step-time targets, from 0.4 to 1.6 times the tightest gap bound

# Setting fields by what an engine accepts. A stock vLLM takes these by flag; our engine and the hook take all.
STOCK_VLLM = frozenset({"step_tokens", "chunk_cap_tokens"})
CAPS = frozenset({"max_partial_prefills", "max_long_partial_prefills"})
EVERYTHING = SEARCHED


class Suggest(Protocol):
    """Where numbers come from: a sampler, a random generator, or a recorded trial."""

    def integer(self, name: str, low: int, high: int) -> int:
        """A whole number within low..high, on a logarithmic scale."""
        ...

    def choice(self, name: str, options: tuple[int, ...]) -> int:
        """One of the options, which have no order."""
        ...


@dataclass(frozen=True)
class SearchSpace:
    """``knobs`` (fields of Setting) around a base setting that holds everything else.

    low_tokens, high_tokens: the token budgets allowed, both multiples of ``grid_tokens``. A chunk cap at or above the
    budget means no cap, so that the cap is one plain number for a sampler and "none" is where large caps lead.
    gap_bound_s: the tightest gap target, around which step-time targets are tried (0: that policy is left out).
    bounds: (field of Setting, least, greatest) for knobs that may not go as far as the engine could; a sequence cap
    without bounds goes from a sixteenth of the base's to the base's. A chunk cap of 0 is inside its bounds when these
    begin at 0 or reach the greatest budget.
    """

    base: Setting
    low_tokens: int
    high_tokens: int
    grid_tokens: int = GRID_TOKENS
    knobs: frozenset[str] = STOCK_VLLM
    gap_bound_s: float = 0.0
    bounds: tuple[tuple[str, float, float], ...] = ()

    def __post_init__(self) -> None:
        if not self.grid_tokens <= self.low_tokens <= self.high_tokens:
            raise bad_value(
                "search range", (self.low_tokens, self.high_tokens), f"{self.grid_tokens} <= low <= high", "widen it"
            )
        if not self.knobs <= EVERYTHING:
            raise bad_value("knobs", sorted(self.knobs), f"of {sorted(EVERYTHING)}", "name fields of Setting")

    @property
    def _units(self) -> tuple[int, int]:
        return self.low_tokens // self.grid_tokens, self.high_tokens // self.grid_tokens

    @property
    def _caps(self) -> tuple[int, int, bool]:
        """Least and greatest chunk cap in units, and whether none is allowed too."""
        low, high = self._pressures
        bound = self._bound("chunk_cap_tokens")
        if bound is None:
            return low, high, True
        most = min(max(math.floor(bound[1] / self.grid_tokens), 1), high)
        least = min(max(math.ceil(bound[0] / self.grid_tokens), low), most)
        return least, most, bound[0] <= 0 or bound[1] >= self.high_tokens

    def _bound(self, name: str) -> tuple[float, float] | None:
        return next(((low, high) for known, low, high in self.bounds if known == name), None)

    def _allowed(self, name: str, options: tuple[int, ...]) -> tuple[int, ...]:
        """The options within the bounds of a knob; what the base has when there are none."""
        low, high = self._bound(name) or (-math.inf, math.inf)
        return tuple(o for o in options if low <= o <= high) or (int(getattr(self.base, name)),)

    def draw(self, suggest: Suggest) -> Setting:
        """One Setting, asking ``suggest`` for every number it needs."""
        changed: dict[str, Any] = {}
        budget = self.base.step_tokens
        if "step_tokens" in self.knobs:
            budget = changed["step_tokens"] = suggest.integer("budget_units", *self._units) * self.grid_tokens
        if "chunk_cap_tokens" in self.knobs:
            low, high, none = self._caps
            cap = suggest.integer("cap_units", low, high) * self.grid_tokens
            changed["chunk_cap_tokens"] = 0 if none and cap >= min(budget, high * self.grid_tokens) else cap
        if "max_running" in self.knobs:
            changed["max_running"] = min(suggest.integer("sequences", *self._sequences), budget)
        if "max_partial_prefills" in self.knobs:
            options = self._allowed("max_partial_prefills", PARTIAL_PREFILLS)
            changed["max_partial_prefills"] = suggest.choice("partial_prefills", options)
        if "max_long_partial_prefills" in self.knobs:
            options = self._allowed("max_long_partial_prefills", LONG_PARTIAL_PREFILLS)
            changed["max_long_partial_prefills"] = suggest.choice("long_partial_prefills", options)
            if changed["max_long_partial_prefills"] > 0:
                changed["long_prompt_tokens"] = 1024 * suggest.integer("long_prompt_units", 1, 64)
        if "budget_policy" in self.knobs:
            changed.update(self._budget_policy(suggest, budget))
        if "order_policy" in self.knobs:
            options = self._allowed("order_policy", (FCFS, SHORTEST_FIRST, DEADLINE))
            changed["order_policy"] = suggest.choice("order_policy", options)
            if changed["order_policy"] != FCFS:
                changed["aging_s"] = float(suggest.choice("aging_s", AGING_S))
                changed["aged_share"] = 1.0 / suggest.choice("aged_one_in", self._aged_one_in)
                weight = suggest.choice("work_weight", self._work_weights)
                changed["wait_tokens_per_s"] = self._wait_tokens_per_s(weight)
        return self.base._replace(**changed)

    @property
    def _aged_one_in(self) -> tuple[int, ...]:
        low, high = self._bound("aged_share") or (0.0, 1.0)
        return tuple(steps for steps in AGED_ONE_IN if low <= 1.0 / steps <= high) or (1,)

    @property
    def _work_weights(self) -> tuple[int, ...]:
        most = (self._bound("wait_tokens_per_s") or (0.0, math.inf))[1]
        return tuple(weight for weight in WORK_WEIGHTS if self._wait_tokens_per_s(weight) <= most)

    def _wait_tokens_per_s(self, weight: int) -> float:
        """Tokens that are read in 1/weight seconds; 0 where that is not known."""
        cost = weight * self.base.prefill_s_per_token
        return min(float(round(1.0 / cost)), KNOB["wait_tokens_per_s"].most(0, 0)) if cost > 0.0 else 0.0

    @property
    def _sequences(self) -> tuple[int, int]:
        low, high = self._bound("max_running") or (max(self.base.max_running // 16, 1), self.base.max_running)
        return max(math.ceil(low), 1), max(math.floor(high), 1)

    def _budget_policy(self, suggest: Suggest, budget: int) -> dict[str, Any]:
        kinds = (FIXED_BUDGET, PRESSURE) + ((STEP_TIME_TARGET,) if self.gap_bound_s > 0 else ())
        kind = suggest.choice("budget_policy", self._allowed("budget_policy", kinds))
        if kind == STEP_TIME_TARGET:
            step = suggest.integer("budget_target_steps", TARGET_STEPS * 2 // 5, TARGET_STEPS * 8 // 5)
            return {"budget_policy": kind, "budget_target_s": self.gap_bound_s * step / TARGET_STEPS}
        if kind == PRESSURE:
            units = suggest.integer("pressure_units", *self._pressures)
            return {
                "budget_policy": kind,
                "pressure_tokens": min(units * self.grid_tokens, budget),
                "pressure_prefills": suggest.choice("pressure_prefills", (1, 2, 4)),
            }
        return {"budget_policy": kind}

    @property
    def _pressures(self) -> tuple[int, int]:
        high = self._units[1]
        return min(max(MIN_CHUNK_CAP_TOKENS // self.grid_tokens, 1), high), high

    @property
    def fullest(self) -> Setting:
        """The setting with the fullest steps: the highest budget, cap and sequences, and no policy."""
        most = dict.fromkeys(("budget_units", "cap_units", "sequences"), 1 << 30)
        none = dict.fromkeys(("partial_prefills", "long_partial_prefills", "budget_policy", "order_policy"), 0)
        return self.draw(Recorded({**self.params(self.base), **most, **none}))

    def params(self, setting: Setting) -> dict[str, int]:
        """The numbers that lead to the point of this space nearest to ``setting`` (a warm start)."""
        low, high = self._units
        least, most, _ = self._caps
        pressure_low, pressure_high = self._pressures
        cap = setting.chunk_cap_tokens if setting.chunk_cap_tokens > 0 else self.high_tokens
        target_steps = round(setting.budget_target_s / self.gap_bound_s * TARGET_STEPS) if self.gap_bound_s > 0 else 0
        return {
            "budget_units": min(max(round(setting.step_tokens / self.grid_tokens), low), high),
            "cap_units": min(max(round(cap / self.grid_tokens), least), most),
            "sequences": setting.max_running,
            "partial_prefills": setting.max_partial_prefills,
            "long_partial_prefills": setting.max_long_partial_prefills,
            "long_prompt_units": min(max(setting.long_prompt_tokens // 1024, 1), 64),
            "budget_policy": setting.budget_policy,
            "budget_target_steps": min(max(target_steps, TARGET_STEPS * 2 // 5), TARGET_STEPS * 8 // 5),
            "pressure_units": min(max(setting.pressure_tokens // self.grid_tokens, pressure_low), pressure_high),
            "pressure_prefills": setting.pressure_prefills,
            "order_policy": setting.order_policy,
            "aging_s": round(setting.aging_s),
            "aged_one_in": round(1.0 / setting.aged_share),
            "work_weight": min(WORK_WEIGHTS, key=lambda w: abs(self._wait_tokens_per_s(w) - setting.wait_tokens_per_s)),
        }


class Recorded:
    """Numbers from a mapping, brought inside the bounds; remembers which were used."""

    def __init__(self, params: Mapping[str, int]) -> None:
        self._params = params
        self.used: dict[str, int] = {}

    def integer(self, name: str, low: int, high: int) -> int:
        self.used[name] = min(max(round(self._params[name]), low), high)
        return self.used[name]

    def choice(self, name: str, options: tuple[int, ...]) -> int:
        wanted = self._params[name]
        self.used[name] = wanted if wanted in options else options[0]
        return self.used[name]


def search_space(
    engine: Engine,
    base: Setting,
    slo: Slo,
    model: StepModel,
    *,
    knobs: frozenset[str] = STOCK_VLLM,
    bounds: Mapping[str, tuple[float, float]] | None = None,
) -> SearchSpace:
    """Everything the boot envelope allows: from the sequence cap (a smaller budget starves decodes) to the ceiling.

    bounds: knob -> (least, greatest) where an operator or a trust region allows less; a knob whose bounds hold no
    point of the grid keeps what it has. What order policies need to know (the tightest TTFT target, the time a prompt
    token takes) goes into the base.
    """
    grid = min(GRID_TOKENS, engine.boot.ceiling_tokens)
    top = engine.boot.ceiling_tokens // grid * grid
    low = max(-(-base.max_running // grid) * grid, grid)
    if low > top:
        raise bad_value(
            "budget ceiling", top, f"at least the sequence cap ({base.max_running})", "raise it or lower --max-seqs"
        )
    given = dict(bounds or {})
    if "step_tokens" in given:
        least, most = given["step_tokens"]
        low, top = max(low, math.ceil(least / grid) * grid), min(top, math.floor(most / grid) * grid)
        if low > top:
            knobs = knobs - {"step_tokens"}
            low = top = max(base.step_tokens // grid, 1) * grid
    empty = {name for name, (least, most) in given.items() if least > most}
    if "chunk_cap_tokens" in given and given["chunk_cap_tokens"][1] < grid:
        empty.add("chunk_cap_tokens")
    knobs = knobs - empty
    ttft = [target.bound_s for target, _ in slo.all_targets() if target.metric == "ttft"]
    if "order_policy" in knobs:
        base = base._replace(
            ttft_target_s=base.ttft_target_s or (min(ttft) if ttft else 0.0),
            prefill_s_per_token=base.prefill_s_per_token or model.slope_s_per_token,
        )
    kept = tuple(sorted((name, least, most) for name, (least, most) in given.items() if name != "step_tokens"))
    return SearchSpace(base, low, top, grid, knobs, slo.tightest_gap_s() or 0.0, kept)

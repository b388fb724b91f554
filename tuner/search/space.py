"""What may be searched: an engine's knobs, their grid, and the map between a sampler's numbers and a Setting.

``SearchSpace.draw`` asks for one number after the other, some only when an earlier choice calls for them, and
``params`` gives the numbers that lead back to a Setting. Optuna, the random baseline and warm starts all use the two.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from policies.errors import bad_value
from policies.request import DEADLINE, FCFS, FIXED_BUDGET, PRESSURE, SHORTEST_FIRST, STEP_TIME_TARGET, Setting
from policies.slo import Slo
from policies.step_time import StepModel
from tuner.sim.engine import Engine

GRID_TOKENS = 8
MIN_CHUNK_CAP_TOKENS = 16
PARTIAL_PREFILLS = (0, 1, 2, 4, 8)
LONG_PARTIAL_PREFILLS = (0, 1, 2)
AGING_S = (5, 10, 30)
TARGET_STEPS = 40  # of the grid of step-time targets, from 0.4 to 1.6 times the tightest gap bound

# Setting fields by what an engine can be told. A stock vLLM takes these by flag; our engine and the hook take all.
STOCK_VLLM = frozenset({"step_tokens", "chunk_cap_tokens"})
CAPS = frozenset({"max_partial_prefills", "max_long_partial_prefills"})
POLICIES = frozenset({"budget_policy", "order_policy"})
EVERYTHING = STOCK_VLLM | CAPS | POLICIES | {"max_running"}


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
    """

    base: Setting
    low_tokens: int
    high_tokens: int
    grid_tokens: int = GRID_TOKENS
    knobs: frozenset[str] = STOCK_VLLM
    gap_bound_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.grid_tokens <= self.low_tokens <= self.high_tokens:
            raise bad_value(
                "search range", (self.low_tokens, self.high_tokens), f"{self.grid_tokens} <= low <= high", "widen it"
            )
        if not self.knobs <= EVERYTHING or not STOCK_VLLM <= self.knobs:
            raise bad_value("knobs", sorted(self.knobs), f"of {sorted(EVERYTHING)}", "name fields of Setting")

    @property
    def _units(self) -> tuple[int, int]:
        return self.low_tokens // self.grid_tokens, self.high_tokens // self.grid_tokens

    @property
    def _cap_low(self) -> int:
        return min(max(MIN_CHUNK_CAP_TOKENS // self.grid_tokens, 1), self._units[1])

    def draw(self, suggest: Suggest) -> Setting:
        """One Setting, asking ``suggest`` for every number it needs."""
        low, high = self._units
        budget = suggest.integer("budget_units", low, high) * self.grid_tokens
        cap = suggest.integer("cap_units", self._cap_low, high) * self.grid_tokens
        changed: dict[str, Any] = {"step_tokens": budget, "chunk_cap_tokens": 0 if cap >= budget else cap}
        if "max_running" in self.knobs:
            most = self.base.max_running
            changed["max_running"] = min(suggest.integer("sequences", max(most // 16, 1), most), budget)
        if "max_partial_prefills" in self.knobs:
            changed["max_partial_prefills"] = suggest.choice("partial_prefills", PARTIAL_PREFILLS)
        if "max_long_partial_prefills" in self.knobs:
            changed["max_long_partial_prefills"] = suggest.choice("long_partial_prefills", LONG_PARTIAL_PREFILLS)
            if changed["max_long_partial_prefills"] > 0:
                changed["long_prompt_tokens"] = 1024 * suggest.integer("long_prompt_units", 1, 64)
        if "budget_policy" in self.knobs:
            changed.update(self._budget_policy(suggest, budget))
        if "order_policy" in self.knobs:
            changed["order_policy"] = suggest.choice("order_policy", (FCFS, SHORTEST_FIRST, DEADLINE))
            if changed["order_policy"] != FCFS:
                changed["aging_s"] = float(suggest.choice("aging_s", AGING_S))
        return self.base._replace(**changed)

    def _budget_policy(self, suggest: Suggest, budget: int) -> dict[str, Any]:
        kinds = (FIXED_BUDGET, PRESSURE) + ((STEP_TIME_TARGET,) if self.gap_bound_s > 0 else ())
        kind = suggest.choice("budget_policy", kinds)
        if kind == STEP_TIME_TARGET:
            step = suggest.integer("budget_target_steps", TARGET_STEPS * 2 // 5, TARGET_STEPS * 8 // 5)
            return {"budget_policy": kind, "budget_target_s": self.gap_bound_s * step / TARGET_STEPS}
        if kind == PRESSURE:
            units = suggest.integer("pressure_units", self._cap_low, self._units[1])
            return {
                "budget_policy": kind,
                "pressure_tokens": min(units * self.grid_tokens, budget),
                "pressure_prefills": suggest.choice("pressure_prefills", (1, 2, 4)),
            }
        return {"budget_policy": kind}

    def params(self, setting: Setting) -> dict[str, int]:
        """The numbers that lead to the point of this space nearest to ``setting`` (a warm start)."""
        low, high = self._units
        cap = setting.chunk_cap_tokens if setting.chunk_cap_tokens > 0 else self.high_tokens
        target_steps = round(setting.budget_target_s / self.gap_bound_s * TARGET_STEPS) if self.gap_bound_s > 0 else 0
        return {
            "budget_units": min(max(round(setting.step_tokens / self.grid_tokens), low), high),
            "cap_units": min(max(round(cap / self.grid_tokens), self._cap_low), high),
            "sequences": setting.max_running,
            "partial_prefills": setting.max_partial_prefills,
            "long_partial_prefills": setting.max_long_partial_prefills,
            "long_prompt_units": min(max(setting.long_prompt_tokens // 1024, 1), 64),
            "budget_policy": setting.budget_policy,
            "budget_target_steps": min(max(target_steps, TARGET_STEPS * 2 // 5), TARGET_STEPS * 8 // 5),
            "pressure_units": min(max(setting.pressure_tokens // self.grid_tokens, self._cap_low), high),
            "pressure_prefills": setting.pressure_prefills,
            "order_policy": setting.order_policy,
            "aging_s": round(setting.aging_s),
        }


class Recorded:
    """Numbers from a mapping, brought inside the bounds asked for; remembers which were asked for."""

    def __init__(self, params: Mapping[str, int]) -> None:
        self._params = params
        self.asked: dict[str, int] = {}

    def integer(self, name: str, low: int, high: int) -> int:
        self.asked[name] = min(max(self._params[name], low), high)
        return self.asked[name]

    def choice(self, name: str, options: tuple[int, ...]) -> int:
        wanted = self._params[name]
        self.asked[name] = wanted if wanted in options else options[0]
        return self.asked[name]


def search_space(
    engine: Engine,
    base: Setting,
    slo: Slo,
    model: StepModel,
    *,
    knobs: frozenset[str] = STOCK_VLLM,
) -> SearchSpace:
    """Everything the boot envelope allows: from the sequence cap (a smaller budget starves decodes) to the ceiling.

    What order policies need to know (the tightest TTFT target, the time a prompt token takes) goes into the base.
    """
    grid = min(GRID_TOKENS, engine.boot.ceiling_tokens)
    top = engine.boot.ceiling_tokens // grid * grid
    low = max(-(-base.max_running // grid) * grid, grid)
    if low > top:
        raise bad_value(
            "budget ceiling", top, f"at least the sequence cap ({base.max_running})", "raise it or lower --max-seqs"
        )
    ttft = [target.bound_s for target, _ in slo.all_targets() if target.metric == "ttft"]
    gaps = [target.bound_s for target, _ in slo.all_targets() if target.metric in ("gap", "longest_gap", "tpot")]
    if "order_policy" in knobs:
        base = base._replace(
            ttft_target_s=base.ttft_target_s or (min(ttft) if ttft else 0.0),
            prefill_s_per_token=base.prefill_s_per_token or model.slope_s_per_token,
        )
    return SearchSpace(base, low, top, grid, knobs, min(gaps, default=0.0))

"""What may be searched: bounds and grid of an engine's knobs, and the map from a sampler's numbers to a Setting."""

from collections.abc import Mapping
from dataclasses import dataclass

from policies.errors import bad_value
from policies.request import Setting
from tuner.sim.engine import Engine

GRID_TOKENS = 8
MIN_CHUNK_CAP_TOKENS = 16


@dataclass(frozen=True)
class SearchSpace:
    """Budget and chunk cap on a grid of ``grid_tokens``, around a base setting that holds everything else.

    low_tokens, high_tokens: the token budgets allowed, both multiples of the grid. A chunk cap at or above the
    budget means no cap, so that the cap is one plain number for a sampler and "none" is where large caps lead.
    """

    base: Setting
    low_tokens: int
    high_tokens: int
    grid_tokens: int = GRID_TOKENS

    def __post_init__(self) -> None:
        if not self.grid_tokens <= self.low_tokens <= self.high_tokens:
            raise bad_value(
                "search range", (self.low_tokens, self.high_tokens), f"{self.grid_tokens} <= low <= high", "widen it"
            )

    def bounds(self) -> dict[str, tuple[int, int]]:
        """Name to inclusive bounds, in grid units; both are searched on a logarithmic scale."""
        cap_low = max(MIN_CHUNK_CAP_TOKENS // self.grid_tokens, 1)
        high = self.high_tokens // self.grid_tokens
        return {"budget_units": (self.low_tokens // self.grid_tokens, high), "cap_units": (min(cap_low, high), high)}

    def setting(self, units: Mapping[str, int]) -> Setting:
        """The Setting of a sampler's numbers."""
        budget = units["budget_units"] * self.grid_tokens
        cap = units["cap_units"] * self.grid_tokens
        return self.base._replace(step_tokens=budget, chunk_cap_tokens=0 if cap >= budget else cap)

    def units(self, setting: Setting) -> dict[str, int]:
        """The numbers nearest to a Setting, inside the bounds (a warm start)."""
        cap = setting.chunk_cap_tokens if setting.chunk_cap_tokens > 0 else self.high_tokens
        wanted = {"budget_units": setting.step_tokens, "cap_units": cap}
        return {
            name: min(max(round(wanted[name] / self.grid_tokens), low), high)
            for name, (low, high) in self.bounds().items()
        }


def search_space(engine: Engine, base: Setting, *, high_tokens: int | None = None) -> SearchSpace:
    """Everything the boot envelope allows: from the sequence cap (a smaller budget starves decodes) to the ceiling."""
    grid = min(GRID_TOKENS, engine.boot.ceiling_tokens)
    top = min(high_tokens or engine.boot.ceiling_tokens, engine.boot.ceiling_tokens) // grid * grid
    low = max(-(-base.max_running // grid) * grid, grid)
    if low > top:
        raise bad_value(
            "budget ceiling", top, f"at least the sequence cap ({base.max_running})", "raise it or lower --max-seqs"
        )
    return SearchSpace(base, low, top, grid)

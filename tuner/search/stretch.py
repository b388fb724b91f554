"""Single steps of a stretch of a replay: what they carried, how long they took, what was full meanwhile."""

from dataclasses import dataclass

import numpy as np

from rooftune.policies.outcomes import BoolArray, FloatArray, IntArray
from rooftune.policies.request import Setting
from rooftune.policies.slo import Slo, good
from rooftune.tuner.search.evaluation import Case
from rooftune.tuner.sim.engine import Engine
from rooftune.tuner.sim.result import RunResult
from rooftune.tuner.sim.twin import simulate
from rooftune.tuner.traffic.reshape import window
from rooftune.tuner.traffic.workload import Traffic

# A log row is one request in one step (32 bytes); a stretch that would need more begins later than an idle instant.
MOST_ROWS = 3_000_000
MINUTE_S = 60.0


@dataclass(frozen=True, eq=False)
class Steps:
    """Consecutive steps as columns. start_s on the traffic's clock; tokens and sequences of each step.

    waiting: requests that had arrived and not been scheduled when the step began. exact: False when the stretch was
    replayed from a moment at which earlier requests were still running, so that it only resembles the whole replay.
    """

    start_s: FloatArray
    duration_s: FloatArray
    decode_tokens: IntArray
    prefill_tokens: IntArray
    sequences: IntArray
    waiting: IntArray
    exact: bool

    def __len__(self) -> int:
        return len(self.start_s)

    def between(self, start_s: float, length_s: float) -> "Steps":
        """Those that run within the window, also in part."""
        kept = (self.start_s + self.duration_s > start_s) & (self.start_s < start_s + length_s)
        return Steps(
            self.start_s[kept],
            self.duration_s[kept],
            self.decode_tokens[kept],
            self.prefill_tokens[kept],
            self.sequences[kept],
            self.waiting[kept],
            self.exact,
        )

    def time_share(self, which: BoolArray) -> float:
        """Share of the steps' time, 0..1; 0 without steps."""
        total = float(self.duration_s.sum())
        return float(self.duration_s[which].sum()) / total if total > 0.0 else 0.0


def worst_window(result: RunResult, slo: Slo, length_s: float = MINUTE_S) -> tuple[float, int]:
    """Start of the window in which most bad requests arrive, and how many; the busiest by tokens when none is bad."""
    outcomes = result.outcomes
    bad = ~good(outcomes, slo) if slo.all_targets() else ~outcomes.finished
    weight = bad.astype(np.float64)
    if not bad.any():
        weight = (outcomes.prompt_tokens + outcomes.output_tokens).astype(np.float64)
    arrival_s = outcomes.arrival_s
    sums = np.concatenate([[0.0], np.cumsum(weight)])
    # The best window can begin at an arrival; the first of equals.
    after = np.searchsorted(arrival_s, arrival_s + length_s, side="left")
    found = sums[after] - sums[: len(arrival_s)]
    first = int(np.argmax(found))
    return float(arrival_s[first]), int(bad[first : after[first]].sum())


def steps_between(case: Case, setting: Setting, result: RunResult, start_s: float, length_s: float) -> Steps:
    """Replay again what ``result`` replayed, as little of it as gives the same steps in the window, and list those."""
    traffic, engine = case.traffic, case.engine
    last = int(np.searchsorted(traffic.arrival_s, start_s + length_s, side="left"))
    first, exact = _lead_in(traffic, engine, setting, result, start_s, last)
    begin_s = float(traffic.arrival_s[first])
    part, offset_s = traffic, 0.0
    if first > 0 or last < len(traffic):
        part, offset_s = window(traffic, begin_s, start_s + length_s - begin_s), begin_s
    run = simulate(part, engine, setting, case.model, keep_log=True)
    return _steps(run, engine, offset_s, exact).between(start_s, length_s)


def _lead_in(
    traffic: Traffic, engine: Engine, setting: Setting, result: RunResult, start_s: float, last: int
) -> tuple[int, bool]:
    """First request to replay: the latest that found the engine idle before the window, and whether that is exact."""
    scheduled, finish = result.outcomes.scheduled_s, result.outcomes.finish_s
    busy_until = np.where(np.isnan(scheduled), -np.inf, np.where(np.isnan(finish), np.inf, finish))
    before = np.concatenate([[-np.inf], np.maximum.accumulate(busy_until)[:-1]])
    if engine.boot.contents == 1:
        before[1:] = np.inf  # an idle engine still remembers prefixes
    idle = np.flatnonzero((before <= traffic.arrival_s) & (traffic.arrival_s <= start_s))
    first = int(idle[-1]) if len(idle) else 0
    chunk = min(setting.chunk_cap_tokens or setting.step_tokens, setting.step_tokens)
    rows = (traffic.output_tokens + traffic.prompt_tokens // chunk + 1)[:last]
    needed = np.cumsum(rows[::-1])[::-1]
    fitting = int(np.searchsorted(-needed, -float(MOST_ROWS), side="left"))
    if fitting <= first:
        return first, True
    return min(fitting, int(np.searchsorted(traffic.arrival_s, start_s, side="right")) - 1, last - 1), False


def _steps(run: RunResult, engine: Engine, offset_s: float, exact: bool) -> Steps:
    outcomes = run.outcomes
    if not len(run.log):
        nothing, none = np.zeros(0), np.zeros(0, dtype=np.int64)
        return Steps(nothing, nothing, none, none, none, none, exact)
    step, request, tokens = run.log.T
    firsts = np.flatnonzero(np.diff(step, prepend=step[0] - 1))
    end_s = run.log_times_s[firsts]
    # After an idle time a step begins with the arrival that ends it.
    arrived_s = np.minimum.reduceat(outcomes.arrival_s[request], firsts)
    start_s = np.maximum(np.concatenate([[-np.inf], end_s[:-1]]), arrived_s)
    first_token_s = outcomes.first_token_s[request] - engine.outside_first_s
    # A step is at least microseconds long, so the slack only covers rounding.
    decode = (tokens == 1) & (run.log_times_s > first_token_s + 1e-9)
    scheduled = np.sort(outcomes.scheduled_s[~np.isnan(outcomes.scheduled_s)])
    seen = outcomes.arrival_s[~np.isnan(outcomes.scheduled_s)]
    waiting = np.searchsorted(seen, start_s, side="right") - np.searchsorted(scheduled, start_s, side="right")
    return Steps(
        start_s=start_s + offset_s,
        duration_s=end_s - start_s,
        decode_tokens=np.add.reduceat(np.where(decode, tokens, 0), firsts),
        prefill_tokens=np.add.reduceat(np.where(decode, 0, tokens), firsts),
        sequences=np.diff(np.append(firsts, len(step))),
        waiting=np.maximum(waiting, 0),
        exact=exact,
    )

"""The result of one replay: instants per request, the exact distribution of gaps, and the run's totals."""

from dataclasses import dataclass

import numpy as np

from rooftune.policies.outcomes import Outcomes
from rooftune.policies.request import PREEMPTIONS, FloatArray, IntArray, State
from rooftune.tuner.sim import kernel
from rooftune.tuner.sim.engine import Engine
from rooftune.tuner.sim.progress import Progress, progress_of
from rooftune.tuner.traffic.workload import Traffic


@dataclass(frozen=True, eq=False)
class RunResult:
    """One replay. Instants in seconds on the traffic's clock, NaN when not reached; one row a request.

    gap_values_s, gap_weights: the exact distribution of all gaps. span_s: first arrival to last finish.
    steps: steps run; skipped_steps: of these, not planned one by one. refused: requests that could never fit the
    KV pool. stalled: True if some requests could not continue. log, log_times_s: (step, request, tokens)
    of everything planned and the step's end, only when asked for. left: what was in the engine at the end.
    """

    outcomes: Outcomes
    preemptions: IntArray
    steps: int
    skipped_steps: int
    computed_tokens: int
    cache_hit_tokens: int
    preempted: int
    refused: int
    stalled: bool
    span_s: float
    log: IntArray
    log_times_s: FloatArray
    left: Progress

    @property
    def busy_share(self) -> float:
        """Share of the span in which steps ran, 0..1: an engine is idle from the last finish to the next arrival."""
        finish_s = np.where(np.isnan(self.outcomes.finish_s), np.inf, self.outcomes.finish_s)
        gap_s = self.outcomes.arrival_s[1:] - np.maximum.accumulate(finish_s)[:-1]
        return min(max(1.0 - float(np.maximum(gap_s, 0.0).sum()) / self.span_s, 0.0), 1.0)

    @classmethod
    def from_run(
        cls,
        traffic: Traffic,
        engine: Engine,
        state: State,
        run: kernel.Run,
        gaps: tuple[FloatArray, IntArray],
        log: tuple[IntArray, FloatArray],
    ) -> "RunResult":
        """Turn the kernel's arrays into values; adds the constant times outside the engine."""
        times, totals = run.times, [int(total) for total in run.totals]
        first, finish = times[:, kernel.FIRST_TOKEN_S], times[:, kernel.FINISH_S]
        finished = ~np.isnan(finish)
        outside_last = np.where(traffic.output_tokens > 1, engine.outside_token_s, engine.outside_first_s)
        last = float(np.max(finish[finished])) if finished.any() else float(traffic.arrival_s[-1])
        outcomes = Outcomes(
            arrival_s=traffic.arrival_s,
            scheduled_s=times[:, kernel.SCHEDULED_S],
            first_token_s=first + engine.outside_first_s,
            finish_s=finish + outside_last,
            longest_gap_s=times[:, kernel.LONGEST_GAP_S],
            gap_count=np.where(finished, traffic.output_tokens - 1, 0),
            prompt_tokens=traffic.prompt_tokens,
            output_tokens=traffic.output_tokens,
            cached_tokens=traffic.cached_tokens,
            tenant=traffic.tenant,
            tenant_names=traffic.tenant_names,
            failed=~finished,
            gap_bounds_s=run.gap_bounds_s,
            gap_over=np.where(finished[:, None], run.gap_over, 0),
            gap_values_s=gaps[0],
            gap_weights=gaps[1].astype(np.float64),
        )
        return cls(
            outcomes=outcomes,
            preemptions=state.requests[:, PREEMPTIONS].copy(),
            steps=totals[kernel.STEPS],
            skipped_steps=totals[kernel.SKIPPED_STEPS],
            computed_tokens=totals[kernel.COMPUTED_TOKENS],
            cache_hit_tokens=totals[kernel.CACHE_HIT_TOKENS],
            preempted=totals[kernel.PREEMPTED],
            refused=totals[kernel.REFUSED],
            stalled=bool(totals[kernel.STALLED]),
            span_s=max(last - float(traffic.arrival_s[0]), 1e-9),
            log=log[0],
            log_times_s=log[1],
            left=progress_of(state, run),
        )

"""Evaluates settings on one traffic: a few replays at a time, each setting once."""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np

from rooftune.policies.request import Setting
from rooftune.policies.slo import Slo
from rooftune.tuner.search.evaluation import Case, Evaluation, Role
from rooftune.tuner.search.objective import evaluate
from rooftune.tuner.sim.twin import Ends
from rooftune.tuner.traffic.reshape import window
from rooftune.tuner.traffic.workload import Traffic

# Replays release the interpreter lock, so two run at a time; results keep the order of the request.
PARALLEL = 2


@dataclass
class Arena:
    """Evaluates settings on one case and remembers; ``replace`` makes one that knows nothing yet.

    max_steps: a replay that takes more is given up. until_decided: it ends when no request can become good any more.
    whole_traffic: False for a few windows of it. paid_steps: steps really simulated. least_share: a replay whose share
    of good requests can no longer reach it is given up, too.
    """

    case: Case
    max_steps: float = math.inf
    until_decided: bool = False
    whole_traffic: bool = True
    paid_steps: int = field(default=0, init=False)
    least_share: float = field(default=0.0, init=False)
    _known: dict[Setting, Evaluation] = field(default_factory=dict, init=False)

    @property
    def ends(self) -> Ends:
        """Of its replays."""
        late = (1.0 - self.least_share) * len(self.case.traffic)
        return Ends(self.max_steps, math.inf, late, patience_s(self.case.slo), self.until_decided)

    def run(
        self, wanted: Sequence[tuple[Setting, Role]], tell: Callable[[int], None] = lambda done: None
    ) -> list[Evaluation]:
        """Evaluate in parallel; tell(done) after each. A known setting costs nothing."""
        fresh = list(dict.fromkeys(setting for setting, _ in wanted if setting not in self._known))
        with ThreadPoolExecutor(PARALLEL) as pool:
            for done, evaluation in enumerate(pool.map(self._evaluate, fresh), start=1):
                self._known[evaluation.setting] = evaluation
                self.paid_steps += evaluation.simulated_steps
                tell(len(wanted) - len(fresh) + done)
        return [replace(self._known[setting], role=role) for setting, role in wanted]

    def _evaluate(self, setting: Setting) -> Evaluation:
        found, _ = evaluate(self.case, setting, Role.SEARCH, self.ends)
        return replace(found, whole_traffic=self.whole_traffic)


def patience_s(slo: Slo) -> float:
    """How long any request may wait for its first token (s) before it cannot be good any more; +inf: for ever."""
    found = math.inf
    for metric in ("ttft", "e2e"):
        if any(target.metric == metric for target in slo.targets):
            found = min(found, max(target.bound_s for target, _ in slo.all_targets() if target.metric == metric))
    return found


WINDOWS = 6
CANDIDATES = 60
# Between two windows everything drains: no queue outlasts this.
APART_S = 50_000.0


def slices(traffic: Traffic, share: float, windows: int = WINDOWS) -> Traffic:
    """About ``share`` (0..1) of the requests in windows: the busiest, and others spread evenly over the ranks.

    Windows are chosen by their tokens, so that a stretch of long prompts counts as busy. Deterministic.
    """
    length_s = traffic.span_s * share / windows
    if length_s <= 0.0 or share >= 1.0:
        return traffic
    starts = traffic.arrival_s[0] + np.linspace(0.0, traffic.span_s - length_s, CANDIDATES)
    work = np.concatenate([[0.0], np.cumsum((traffic.prompt_tokens + traffic.output_tokens).astype(np.float64))])
    first = np.searchsorted(traffic.arrival_s, starts)
    after = np.searchsorted(traffic.arrival_s, starts + length_s)
    ranked = np.argsort(work[first] - work[after], kind="stable")  # busiest first
    chosen: list[int] = []
    for place in np.linspace(0, CANDIDATES - 1, windows):
        nearest = ranked[np.argsort(np.abs(np.arange(CANDIDATES) - place), kind="stable")]
        apart = (w for w in nearest if all(abs(starts[w] - starts[c]) >= length_s for c in chosen))
        free = next((w for w in apart if first[w] < after[w]), None)
        if free is not None:
            chosen.append(int(free))
    chosen.sort(key=lambda w: float(starts[w]))
    parts = [window(traffic, float(starts[w]), length_s) for w in chosen]
    keys = [len(part.prefix_keys) for part in parts]
    before = np.concatenate([[0], np.cumsum(keys)[:-1]])
    offsets = [part.prefix_offsets[:-1] + base for part, base in zip(parts, before, strict=True)]
    return replace(
        traffic,
        arrival_s=np.concatenate([part.arrival_s + place * APART_S for place, part in enumerate(parts)]),
        prompt_tokens=np.concatenate([part.prompt_tokens for part in parts]),
        output_tokens=np.concatenate([part.output_tokens for part in parts]),
        cached_tokens=np.concatenate([part.cached_tokens for part in parts]),
        tenant=np.concatenate([part.tenant for part in parts]),
        prefix_offsets=np.concatenate([*offsets, [sum(keys)]])
        if len(traffic.prefix_offsets)
        else traffic.prefix_offsets,
        prefix_keys=np.concatenate([part.prefix_keys for part in parts]),
        name=f"{traffic.name} ({len(parts)} windows)",
    )

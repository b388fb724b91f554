"""A running server at a load near or above what it carries: the same list first at the default, then with the
controller, live and cold. What the benches ``vllm-overload`` and ``live-gain`` share of it.

The queue of an overloaded default grows for as long as the list lasts, so lists are long and sent once. Goodput is the
count of good requests, so its ratio is that of two counts over the same list. The interval holds the chance in the
list, not a machine that is busier in one run than in the other: on a shared one even a controller that pushed nothing
has had a ratio of 1.7.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import yaml

from rooftune.policies.commands import Figure
from rooftune.policies.errors import UnreachableError
from rooftune.tuner.bench.children import say
from rooftune.tuner.bench.live_gain_rounds import Bed, Sizes, bounds_between, listed, ratio_interval
from rooftune.tuner.control.outcome import CycleRecord
from rooftune.tuner.control.state.store import StateFile
from rooftune.tuner.observe.rows import BoolArray, FloatArray
from rooftune.tuner.traffic.workload import Traffic

# Parts of the list, by arrival, that are drawn in pairs for the interval: requests of one busy period are good or bad
# together, so they may not be drawn one by one.
PARTS = 20


# Load of the run that sets the targets, and its longest time.
CALM, CALM_S = 0.5, 60.0


def calm_bounds(bed: Bed, sizes: Sizes, most_rps: float, span_s: float) -> tuple[float, float]:
    """Bounds of TTFT and longest gap, seconds, from the default at half the greatest rate, see ``bounds_between``."""
    requests = listed(sizes, CALM * most_rps, min(span_s / 2.0, CALM_S), seed=4)
    client = bed.client(requests, "calm")
    seen = bed.round(client, requests)
    client.child.stop()
    ttft_s, gap_s = bounds_between(seen.ttft_s, seen.longest_gap_s)
    say(f"it carries {most_rps:.2f} requests/s; good is ttft <= {ttft_s:.3g} s and gap <= {gap_s:.3g} s")
    return ttft_s, gap_s


@dataclass(frozen=True, eq=False)
class Pair:
    """One load. good: by request, at the default and with the controller; records: the controller's."""

    load: float
    requests: Traffic
    default: BoolArray
    tuned: BoolArray
    records: Sequence[CycleRecord]


def pair(
    bed: Bed,
    config: dict[str, object],
    load: float,
    requests: Traffic,
    send: Callable[[str, Traffic], BoolArray],
) -> Pair:
    """The list at the default and then beside a controller with ``config``.

    send: sends the list and says which requests were good; the name tells its files apart. Raises UnreachableError when
    the controller ends before its time or was not live.
    """
    name = f"{round(100 * load):03d}"
    default = send(f"default-{name}", requests)
    say(f"load {load:g}, default: {int(default.sum())} of {len(default)} good")
    state = f"state-{name}"
    file = bed.work / f"rooftune-{name}.yaml"
    file.write_text(yaml.safe_dump({**config, "state": state}))
    controller = bed.children.start(f"controller-{name}", ["run", "--config", str(file)])
    tuned = send(f"tuned-{name}", requests)
    if controller.ended:
        raise UnreachableError(f"the controller ended early: {controller.last_words()}")
    controller.stop()
    with StateFile.visit(bed.work / state) as found:
        records = tuple(found.last(100_000)[::-1])
    if not records:
        raise UnreachableError(f"the controller has left no record of a cycle: {controller.last_words()}")
    why = Counter(record.reason for record in records).most_common(3)
    told = ", ".join(f"{reason} {count}" for reason, count in why)
    say(f"load {load:g}, controller: {int(tuned.sum())} of {len(tuned)} good; cycles: {told}")
    return Pair(load, requests, default, tuned, records)


def by_part(good: BoolArray, arrival_s: FloatArray) -> FloatArray:
    """Good requests in each of ``PARTS`` equal parts of the list's time."""
    edges = np.linspace(float(arrival_s[0]), float(arrival_s[-1]), PARTS + 1)[1:-1]
    counts = np.bincount(np.searchsorted(edges, arrival_s, side="right"), good, PARTS)
    return counts.astype(np.float64)


def goodput_ratio(one: Pair) -> tuple[float, float, float]:
    """Goodput with the controller over the default's and its 95 % interval. A request is added on both sides, so that
    a default that serves nobody in time has a ratio too."""
    tuned, default = (by_part(good, one.requests.arrival_s) + 1.0 / PARTS for good in (one.tuned, one.default))
    return ratio_interval(tuned, default)


def figures(pairs: Sequence[Pair]) -> Iterator[Figure]:
    """goodput_ratio_to_default, the lowest of all loads, then each load's with what it is made of."""
    ratios = [goodput_ratio(one) for one in pairs]
    yield Figure("goodput_ratio_to_default", min(ratio for ratio, _, _ in ratios), "ratio", 1.0)
    yield Figure("below_default_beyond_noise", float(sum(high < 1.0 for _, _, high in ratios)), "loads", 0.0)
    for one, (ratio, low, high) in zip(pairs, ratios, strict=True):
        at = f"at_{round(100 * one.load):03d}"
        yield Figure(f"goodput_ratio_to_default_{at}", ratio, "ratio", 1.0)
        yield Figure(f"goodput_ratio_to_default_{at}_low", low, "ratio", 1.0)
        yield Figure(f"goodput_ratio_to_default_{at}_high", high, "ratio", 1.0)
        yield Figure(f"attainment_{at}", float(one.tuned.mean()), "share", float(one.default.mean()))
        yield Figure(f"requests_{at}", float(len(one.requests)), "requests")
        yield Figure(f"pushes_{at}", float(sum(record.pushed is not None for record in one.records)), "pushes")
        kept = [r.verify for r in one.records if r.verify is not None and r.verify.verdict == "better"]
        yield Figure(f"kept_{at}", float(len(kept)), "pushes")
        if kept and kept[-1].predicted_gain is not None:
            yield Figure(f"foretold_gain_{at}", kept[-1].predicted_gain, "share", kept[-1].observed_gain)
        loads = [record.load for record in one.records if record.load is not None]
        said = sum(load.overload for load in loads) / len(loads) if loads else 0.0
        yield Figure(f"overload_said_{at}", said, "share of cycles")

"""Bench ``controller-weight``: what the controller costs beside an engine, while it idles and while it tunes again.

An engine without a model and the controller in shadow mode, as processes. First nothing is sent; then traffic comes
until a search has run in the controller's child. Memory and time are the controller's own; the child's are apart.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import yaml

from rooftune.policies.commands import Figure
from rooftune.policies.errors import UnreachableError
from rooftune.tuner.bench.children import BYTES_PER_MB, Child, Children, Follower, children_of, cost_of
from rooftune.tuner.bench.live_gain_rounds import Bed, Sizes, listed, serve_bed

# What the project promises: megabytes and share of a core while idle.
MOST_IDLE_MB, MOST_IDLE_SHARE = 150.0, 0.01
SAMPLE_S = 0.5
START_S = 60.0
# A search on a busy machine: start of the child, the twin's compilation when nothing is cached, the trials.
SEARCH_S = 240.0
RATE_RPS = 8.0


@dataclass
class Peak:
    """Greatest resident memory seen, bytes."""

    own: int = 0
    child: int = 0
    samples: list[int] = field(default_factory=list)

    def look(self, pid: int) -> None:
        cost = cost_of(pid)
        if cost is not None:
            self.own = max(self.own, cost.rss_bytes)
            self.samples.append(cost.rss_bytes)
        for one in children_of(pid):
            cost = cost_of(one)
            self.child = max(self.child, cost.rss_bytes if cost is not None else 0)


def bench(short: bool) -> Iterator[Figure]:
    """rss_mb_idle, rss_mb_peak, cpu_share_idle of the controller; child_rss_mb_peak, searches beside them."""
    idle_s, cycle_s = (30.0, 5.0) if short else (300.0, 15.0)
    traffic_s = 0.0 if short else 300.0
    with tempfile.TemporaryDirectory(prefix="rooftune-weight-") as folder, Children(Path(folder)) as children:
        bed, controller = _start(children, Path(folder), cycle_s)
        pid, log = controller.process.pid, controller.err
        _wait(controller, lambda: _cycles(log) >= 2, START_S, Peak())
        idle = Peak()
        begun_s, before = time.monotonic(), cost_of(pid)
        _wait(controller, lambda: time.monotonic() - begun_s >= idle_s, 2 * idle_s, idle)
        after, spent_s = cost_of(pid), time.monotonic() - begun_s
        if before is None or after is None:
            raise UnreachableError(f"the controller ended: {controller.last_words()}")
        busy = Peak(own=idle.own)
        searches = _with_traffic(bed, controller, busy, traffic_s)
    yield Figure("rss_mb_idle", max(idle.samples) / BYTES_PER_MB, "MB", MOST_IDLE_MB)
    yield Figure("rss_mb_peak", busy.own / BYTES_PER_MB, "MB", MOST_IDLE_MB)
    yield Figure("cpu_share_idle", (after.cpu_s - before.cpu_s) / spent_s, "share of a core", MOST_IDLE_SHARE)
    yield Figure("child_rss_mb_peak", busy.child / BYTES_PER_MB, "MB")
    yield Figure("searches", float(searches), "searches")


def _start(children: Children, work: Path, cycle_s: float) -> tuple[Bed, Child]:
    bed = serve_bed(children, work, ["--model", "fake:8b-2tbs"])
    config = work / "rooftune.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "engine": {"url": bed.served.tuning, "token_file": "token"},
                "targets": [{"metric": "ttft", "bound": "1s"}, {"metric": "longest_gap", "bound": "30ms"}],
                "cadence": {"cycle_s": cycle_s, "search_requests": 30, "search_every_s": 60},
                "search": {"trials": 30, "idle_exit_s": 10},
                "listen": "127.0.0.1:0",
                "state": "state",
                "log": {"format": "json"},
            }
        )
    )
    return bed, children.start("controller", ["run", "--config", str(config)])


def _with_traffic(bed: Bed, controller: Child, peak: Peak, at_least_s: float) -> int:
    """Send until a search has ended, and for ``at_least_s``; returns the number of searches that brought something."""
    requests = listed(Sizes((50, 300), (2000, 6000), (5, 30)), RATE_RPS, 5.0, seed=1)
    client = bed.client(requests)
    begun_s = time.monotonic()
    while True:
        bed.round(client, requests)
        peak.look(controller.process.pid)
        found, passed_s = _searches(controller.err), time.monotonic() - begun_s
        if (found and passed_s >= at_least_s) or passed_s > at_least_s + SEARCH_S:
            client.child.stop()
            return found
        if controller.ended:
            raise UnreachableError(f"the controller ended: {controller.last_words()}")


def _wait(controller: Child, done: Callable[[], bool], limit_s: float, peak: Peak) -> None:
    until_s = time.monotonic() + limit_s
    while not done():
        if controller.ended or time.monotonic() > until_s:
            raise UnreachableError(f"the controller did not get there: {controller.last_words()}")
        peak.look(controller.process.pid)
        time.sleep(SAMPLE_S)


def _cycles(log: Path) -> int:
    return len(list(Follower(log).new()))


def _searches(log: Path) -> int:
    """Cycles in a row that say "searching" are one search."""
    reasons = [event["reason"] for event in Follower(log).new()]
    return sum(before == "searching" and after != "searching" for before, after in pairwise(reasons))

"""How much of the machine other processes took while a round ran: on two cores a step beside them is a longer one, and
a long step meets them more surely than a short one, which no fit of the steps before can know."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from rooftune.tuner.bench.children import PROC, children_of, cost_of


@dataclass(frozen=True)
class Busy:
    """At one instant: time_s on a monotonic clock, CPU seconds spent so far by everybody, and by this process and its
    children."""

    time_s: float
    all_s: float
    ours_s: float


def busy(proc: Path = PROC, pid: int | None = None) -> Busy | None:
    """None where the system does not tell (no /proc)."""
    try:
        words = (proc / "stat").read_text().split("\n", 1)[0].split()
    except OSError:
        return None
    tick_s = 1.0 / os.sysconf("SC_CLK_TCK")
    user, nice, system, _idle, _wait, *interrupts = map(int, words[1:9])
    everybody = user + nice + system + sum(interrupts)  # a hypervisor's share, the last of them, is lost to us as well
    return Busy(time.monotonic(), everybody * tick_s, _ours_s(proc, os.getpid() if pid is None else pid))


def others_cpus(before: Busy | None, after: Busy | None) -> float | None:
    """CPUs that others kept busy between two instants, on average."""
    if before is None or after is None or after.time_s <= before.time_s:
        return None
    spent_s = (after.all_s - before.all_s) - (after.ours_s - before.ours_s)
    return max(0.0, spent_s / (after.time_s - before.time_s))


def _ours_s(proc: Path, pid: int) -> float:
    """Of ``pid`` and all below it that live."""
    cost = cost_of(pid, proc)
    below_s = sum(_ours_s(proc, child) for child in children_of(pid, proc))
    return below_s + (0.0 if cost is None else cost.cpu_s)

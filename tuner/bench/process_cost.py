"""What a process costs, from /proc: resident memory, processor time, its children."""

import os
from dataclasses import dataclass
from pathlib import Path

from rooftune.policies.errors import MissingDataError

PROC = Path("/proc")
BYTES_PER_MB = 1e6


@dataclass(frozen=True)
class Cost:
    """rss_bytes: resident now; cpu_s: user and system time since its start."""

    rss_bytes: int
    cpu_s: float


def cost_of(pid: int, proc: Path = PROC) -> Cost | None:
    """None when there is no such process any more. Raises MissingDataError where there is no /proc."""
    if not proc.is_dir():
        raise MissingDataError("memory and processor time are read from /proc, which this system does not have")
    try:
        stat = (proc / str(pid) / "stat").read_text()
        pages = int((proc / str(pid) / "statm").read_text().split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None
    ticks = stat.rpartition(")")[2].split()  # the name before it may hold anything
    cpu_s = (int(ticks[11]) + int(ticks[12])) / os.sysconf("SC_CLK_TCK")
    return Cost(pages * os.sysconf("SC_PAGE_SIZE"), cpu_s)


def children_of(pid: int, proc: Path = PROC) -> list[int]:
    """Processes that it started and that live."""
    found = []
    for entry in proc.iterdir():
        if entry.name.isdecimal():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            if parent == pid:
                found.append(int(entry.name))
    return found

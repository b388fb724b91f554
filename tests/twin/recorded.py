"""What vLLM 0.32.0 decided on a few dozen workloads, kept in a file, so that every test run compares with it.

``python -m tests.twin.recorded VLLM_PYTHON`` records again: it drives that environment's vLLM over candidate
workloads and keeps few that together exercise everything ``compare.coverage`` knows, ``TIMES_COVERED`` times each.
The test with the marker ``vllm`` says when the file and the installed vLLM disagree.
"""

import gzip
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tests.twin.compare import Record, Workload, coverage
from tests.twin.workloads import make_workloads

VLLM_VERSION = "0.32.0"
DRIVER = Path(__file__).with_name("vllm_driver.py")
FILE = Path(__file__).with_name("vllm-0.32.0.jsonl.gz")
TIMES_COVERED = 16


def ask_vllm(python: Path, workloads: Iterable[Workload], timeout_s: float = 900) -> list[Record]:
    """Drive the vLLM of that environment over all workloads, in one process.

    Raises RuntimeError when the driver fails or another version answers.
    """
    lines = "".join(json.dumps(workload) + "\n" for workload in workloads)
    run = subprocess.run([python, DRIVER], input=lines, capture_output=True, text=True, timeout=timeout_s, check=False)
    if run.returncode != 0:
        raise RuntimeError(f"the vLLM driver ended with {run.returncode}:\n{run.stderr[-2000:]}")
    header, *records = map(json.loads, run.stdout.splitlines())
    if header["vllm"] != VLLM_VERSION:
        raise RuntimeError(f"{python} has vLLM {header['vllm']}; the comparison is with {VLLM_VERSION}")
    return records


def load() -> list[tuple[Workload, Record]]:
    """The recorded pairs of workload and vLLM's decisions."""
    with gzip.open(FILE, "rt") as lines:
        return [(pair["workload"], pair["record"]) for pair in map(json.loads, lines)]


def choose(pairs: list[tuple[Workload, Record]]) -> list[tuple[Workload, Record]]:
    """Few pairs that cover everything often enough; short records first, rare things first."""
    seen = [coverage(workload, record) for workload, record in pairs]
    missing: Counter[str] = Counter({name: TIMES_COVERED for names in seen for name in names})
    chosen: list[int] = []
    while any(count > 0 for count in missing.values()):
        gain = [
            sum(missing[name] > 0 for name in names) / (50 + len(record["steps"])) if at not in chosen else 0
            for at, (names, (_, record)) in enumerate(zip(seen, pairs, strict=True))
        ]
        best = gain.index(max(gain))
        if gain[best] == 0:
            break
        chosen.append(best)
        missing.subtract(seen[best])
    return [pairs[at] for at in sorted(chosen)]


def main(python: Path) -> None:
    workloads = list(make_workloads(1000))
    pairs = choose(list(zip(workloads, ask_vllm(python, workloads), strict=True)))
    lines = [json.dumps({"workload": workload, "record": record}, separators=(",", ":")) for workload, record in pairs]
    # No time and no name in the header, so that the same content is the same file.
    FILE.write_bytes(gzip.compress("\n".join(lines).encode(), mtime=0))
    print(f"{len(pairs)} workloads, {FILE.stat().st_size} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

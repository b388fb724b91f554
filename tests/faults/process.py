"""A controller process that kills itself: ``python -m tests.faults.process CONFIG STAGE CYCLE``.

It is the real controller on a real engine, except its searcher, which proposes half the budget in force once. The
process ends itself with SIGKILL after STAGE of the CYCLE-th cycle counted from the one in which that proposal came (0:
that one, in which the push leaves). CYCLE -1: it lives, for as many cycles as stand in the fourth argument.
"""

import os
import signal
import sys

from rooftune.tuner.config import load_config
from rooftune.tuner.control.assemble import run_controller
from rooftune.tuner.control.job import Job, SearchAnswer
from rooftune.tuner.control.outcome import Stage
from tests.control.doubles import Scripted, answer_of


def main(config: str, stage: str, cycle: str, cycles: str = "1000") -> int:
    at, left = Stage(stage), int(cycle)
    proposed: list[Job] = []

    def reply(job: Job) -> SearchAnswer:
        proposed.append(job)
        return answer_of(job, gain=0.3, step_tokens=job.base.step_tokens // 2)

    seen = [0]

    def after(stage: Stage) -> None:
        if not proposed or left < 0 or stage is not at:
            return
        if seen[0] == left:
            os.kill(os.getpid(), signal.SIGKILL)
        seen[0] += 1

    def tell(line: str) -> None:
        print(line, flush=True)

    return run_controller(
        load_config(config), cycles=int(cycles), tell=tell, after_stage=after, searcher=Scripted(reply)
    )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

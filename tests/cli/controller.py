"""The controller's commands of this checkout in this process, and a state folder with something to look at."""

import json
from importlib.metadata import EntryPoint
from pathlib import Path

from rooftune.policies.commands import COMMAND_GROUP
from rooftune.policies.guard import Action, Reason
from rooftune.tuner.cli.main import main
from rooftune.tuner.clock import ManualClock
from rooftune.tuner.control.state.store import StateFile
from tests.control.cycle_records import START_S, figures, hold, push, verify

ROOM = "rooftune.tuner.cli.controller"
PLACES = {name: f"{name}:COMMAND" for name in ("run", "status", "history", "explain")}
PLACES |= {name: f"operator:{name.upper()}" for name in ("pause", "resume", "revert")}
POINTS = {name: EntryPoint(name, f"{ROOM}.{place}", COMMAND_GROUP) for name, place in PLACES.items()}


def rooftune(*words: object) -> int:
    """Exit code of ``rooftune WORDS``."""
    return main([str(word) for word in words], POINTS)


def filled(folder: Path) -> Path:
    """Ten cycles: two pushes, one found better, one worse and reverted; the last push was never recorded."""
    with StateFile.own(folder, clock=ManualClock(wall_s=START_S + 30.0)) as state:
        for number in range(1, 10):
            assert state.next_number() == number
        for record in (
            hold(1),
            hold(2),
            hold(3),
            push(4),
            hold(5, Reason.VERIFYING),
            hold(6, Reason.VERIFYING),
            hold(7, Reason.DWELL, verify=verify(4), observed=figures(attainment=0.964)),
            push(8, pushed={"chunk_cap_tokens": 0}, reason=Reason.OK),
            hold(
                9, Reason.VERDICT_WORSE, action=Action.REVERT,
                verify=verify(8, verdict="worse", reason="loss_shown", observed_gain=-0.031, prediction_held=False),
            ),
        ):  # fmt: skip
            if record.pushed is not None:
                state.note_push(record.number, json.dumps(record.pushed))
            state.put(record)
        state.note_push(state.next_number(), '{"step_tokens": 256}')
    return folder

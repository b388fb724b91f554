"""What ``rooftune doctor`` says: findings, a line each."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Mark(StrEnum):
    """ok: as it should be. note: worth knowing. bad: in the way of tuning."""

    OK = "ok"
    NOTE = "note"
    BAD = "bad"


class Check(StrEnum):
    """What was looked at; the code that tests and scripts read."""

    REACHABLE = "reachable"
    PROTOCOL = "protocol"
    TOKEN = "token"
    ENCRYPTION = "encryption"
    WRITES = "writes"
    BLOCKED = "blocked"
    LEASE = "lease"
    KNOBS = "knobs"
    HEADROOM = "headroom"
    ROWS = "rows"
    ALIVE = "alive"
    VERSION = "version"
    ENGINE_NOTE = "engine_note"
    SIGNAL = "signal"
    HOOK = "hook"
    USES = "uses"
    UNSEEN = "unseen"
    CONTROLLER = "controller"
    PYTHON = "python"
    VLLM = "vllm"
    ROOFTUNE = "rooftune"
    PLUGINS = "plugins"


@dataclass(frozen=True)
class Finding:
    """exit_code: what a bad one ends the command with: 1 refused, 3 unreachable."""

    mark: Mark
    check: Check
    text: str
    remedy: str = ""
    exit_code: int = 0

    def line(self) -> str:
        return f"{self.mark.value:<4}  {self.check.value:<11}  {self.text}" + (
            f"; {self.remedy}" if self.remedy else ""
        )


def ok(check: Check, text: str) -> Finding:
    return Finding(Mark.OK, check, text)


def note(check: Check, text: str, remedy: str = "") -> Finding:
    return Finding(Mark.NOTE, check, text, remedy)


def bad(check: Check, text: str, remedy: str = "", exit_code: int = 1) -> Finding:
    return Finding(Mark.BAD, check, text, remedy, exit_code)


def exit_code(findings: Iterable[Finding]) -> int:
    """The worst of them: 3 before 1 before 0."""
    return max((found.exit_code for found in findings), default=0)

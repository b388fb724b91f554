"""``driver.py serve`` as an endpoint of the protocol's contract."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from rooftune.policies import wire
from tests.links import import_path

ROOT = Path(__file__).resolve().parents[2]


def environment() -> dict[str, str]:
    """Of a process in vLLM's environment that is to find the project."""
    return os.environ | {
        "PYTHONPATH": import_path(),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "",
    }


class Driver:
    """One process with a hooked scheduler; every call waits for its answer."""

    def __init__(self, python: Path) -> None:
        command = [str(python), str(ROOT / "tests/vllm/driver.py"), "serve"]
        self.process = subprocess.Popen(
            command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def ask(self, do: str, body: Any = None) -> str:
        assert self.process.stdin and self.process.stdout and self.process.stderr
        self.process.stdin.write(json.dumps({"do": do, "with": body}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(self.process.stderr.read()[-4000:])
        return line

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


class DriverEndpoint:
    """A fresh scheduler in a running driver; ``**engine``: fields of its engine that are to differ."""

    def __init__(self, driver: Driver, **engine: Any) -> None:
        self.driver = driver
        driver.ask("new", engine)

    def tuning_state(self) -> wire.State:
        return wire.parse(wire.State, self.driver.ask("state").encode(), wire.MAX_ANSWER_BYTES)

    def push(self, request: wire.PushRequest) -> wire.PushAnswer | wire.Refusal:
        text = self.driver.ask("push", request.model_dump_json())
        return wire.parse(wire.Refusal if "code" in json.loads(text) else wire.PushAnswer, text.encode())

    def revert(self, request: wire.RevertRequest) -> wire.PushAnswer:
        return wire.parse(wire.PushAnswer, self.driver.ask("revert", request.model_dump_json()).encode())

    def resume(self, request: wire.ResumeRequest) -> wire.PushAnswer:
        return wire.parse(wire.PushAnswer, self.driver.ask("resume", request.model_dump_json()).encode())

    def steps_after(self, after: int) -> wire.StepColumns:
        return wire.parse(wire.StepColumns, self.driver.ask("steps", after).encode(), wire.MAX_ANSWER_BYTES)

    def requests_after(self, after: int) -> wire.RequestColumns:
        return wire.parse(wire.RequestColumns, self.driver.ask("requests", after).encode(), wire.MAX_ANSWER_BYTES)

    def in_flight(self) -> wire.FlightColumns:
        return wire.parse(wire.FlightColumns, self.driver.ask("in-flight").encode(), wire.MAX_ANSWER_BYTES)

    def load(self) -> None:
        self.driver.ask("load")

    def run_steps(self, count: int) -> None:
        self.driver.ask("run", count)

    def finish(self) -> None:
        self.driver.ask("finish")

    def pass_time(self, seconds: float) -> None:
        self.driver.ask("pass", seconds)

"""A real controller process on an engine process, killed with SIGKILL at every stage of a cycle."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from rooftune.policies import wire
from rooftune.tuner.control.outcome import Stage
from rooftune.tuner.control.state.store import StateFile
from rooftune.tuner.ports.http import HttpPort
from tests.links import import_path
from tests.system.test_serve_fake import ROOT, TOKEN, serving, url

pytestmark = pytest.mark.slow
CONFIG = """
engine: {{url: "{url}", token_file: "{token}"}}
mode: live
targets: [{{metric: ttft, quantile: 0.99, bound: 0.1ms}}]
cadence: {{cycle_s: 0.3, window_s: 60, search_every_s: 60, search_requests: 5, lease_s: 3, settle_s: 0.1, verify_s: 20}}
guard: {{min_shadow_s: 0, dwell_s: 0, largest_ratio: 64, max_inconclusive_s: 700}}
state: "{state}"
listen: null
"""


@dataclass
class Bench:
    """An engine process with a little traffic, and where its controller's configuration is."""

    port: HttpPort
    config: Path
    state: Path

    def state_of_engine(self) -> wire.State:
        return self.port.state()

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tests.faults.process", str(self.config), *words]
        environment = os.environ | {"PYTHONPATH": import_path(), "OMP_NUM_THREADS": "1"}
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180)

    def wait_for_boot(self) -> wire.State:
        """Until no lease is in force; a lease of 3 s must be over well within this."""
        until_s = time.monotonic() + 60.0
        while (state := self.port.state()).lease is not None and time.monotonic() < until_s:
            time.sleep(0.1)
        return state


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    with serving("--tuning-token-file", str(token)) as (_, lines):
        config = tmp_path / "rooftune.yaml"
        config.write_text(CONFIG.format(url=url(lines), token=token, state=tmp_path / "state"))
        stop = threading.Event()
        caller = threading.Thread(target=_traffic, args=(url(lines), stop), daemon=True)
        caller.start()
        port = HttpPort(url(lines), token)
        yield Bench(port, config, tmp_path / "state")
        stop.set()
        caller.join(10)
        port.close()


def _traffic(address: str, stop: threading.Event) -> None:
    number = 0
    with httpx.Client(timeout=30) as client:
        while not stop.is_set():
            number += 1
            prompt = [1 + (number * 7 + at) % 5000 for at in range(60 if number % 4 else 900)]
            body = {"prompt": prompt, "max_tokens": 4, "seed": number}
            try:
                client.post(f"{address}/v1/completions", json=body)
            except httpx.HTTPError:
                return


@pytest.mark.parametrize("stage", list(Stage))
def test_after_sigkill_the_engine_reverts_and_the_next_controller_continues(bench: Bench, stage: Stage) -> None:
    """Killed in the cycle after the push, so that a trial is in force, whatever the stage."""
    killed = bench.run(stage.value, "1")
    assert killed.returncode == -9, killed.stdout + killed.stderr
    state = bench.state_of_engine()
    assert state.lease is not None and state.setting().step_tokens == 1024, "the trial is in force"
    back = bench.wait_for_boot()
    assert back.lease is None and back.setting().step_tokens == 2048 and not back.blocked

    again = bench.run(stage.value, "-1", "12")
    assert again.returncode == 0, again.stderr
    with StateFile.visit(bench.state) as store:
        numbers = [record.number for record in store.last(1000)]
        pushes = store.pushes(10)
        assert numbers == sorted(set(numbers), reverse=True)
        assert len(pushes) == 2 and pushes[0].number > pushes[1].number, "it pushed again after the kill"
    assert "boot setting" in again.stdout, "and returned the lease at its clean exit"
    assert bench.state_of_engine().lease is None


def test_a_controller_restarted_in_time_resumes_the_trial(bench: Bench) -> None:
    killed = bench.run(Stage.PUSH.value, "0")
    assert killed.returncode == -9
    # A lease that waits for a slow start of a process: this is what a long lease is for.
    state = bench.state_of_engine()
    request = wire.PushRequest(
        lease_s=120.0, expected_revision=state.revision, actor=state.lease.actor if state.lease else "", reason="waits"
    )
    assert isinstance(bench.port.push(request), wire.PushAnswer)
    again = bench.run(Stage.PUSH.value, "-1", "3")
    assert again.returncode == 0, again.stderr
    with StateFile.visit(bench.state) as store:
        records = store.last(3)
        pushed = store.pushes(1)[0].number
    assert all(record.verify is not None and record.verify.push_cycle == pushed for record in records)

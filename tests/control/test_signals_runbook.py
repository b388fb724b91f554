"""The runbook: a section for every code that an operator can see, and curl lines that work."""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from rooftune.policies import wire
from rooftune.policies.guard import Reason
from rooftune.tuner.control.signals.find import Signal
from tests.engine.server_harness import HTTP, live

RUNBOOK = (Path(__file__).resolve().parents[2] / "deploy" / "runbook.md").read_text()
SIGNALS, OUTCOMES = RUNBOOK.split("\n## Outcomes\n")
TOKEN = "a-token-of-the-runbook-test"
ROUTES = {("DELETE", "/tuning/v1/lease"), ("POST", "/tuning/v1/resume"), ("GET", "/tuning/v1/state")}
BODIES = {"/tuning/v1/resume": wire.ResumeRequest, "/tuning/v1/lease": wire.RevertRequest}


def sections(part: str) -> dict[str, str]:
    """Code -> text of its section."""
    pieces = re.split(r"^### `(\w+)`.*$", part, flags=re.MULTILINE)
    return dict(zip(pieces[1::2], pieces[2::2], strict=True))


def curl_lines() -> list[str]:
    return [line for line in RUNBOOK.splitlines() if line.startswith("curl ")]


def test_every_signal_and_reason_has_exactly_one_section() -> None:
    assert set(sections(SIGNALS)) == {code.value for code in Signal}
    assert set(sections(OUTCOMES)) == {code.value for code in Reason}


@pytest.mark.parametrize("part", [SIGNALS, OUTCOMES], ids=["signals", "outcomes"])
def test_a_section_says_meaning_response_and_remedy(part: str) -> None:
    for code, text in sections(part).items():
        for label in ("*Means*: ", "*It did*: ", "*Do*: "):
            assert text.count(label) == 1, (code, label)


def test_every_curl_line_is_a_request_that_the_protocol_knows() -> None:
    seen = set()
    for line in curl_lines():
        words = shlex.split(line)
        method = words[words.index("-X") + 1] if "-X" in words else "GET"
        path = next(word for word in words if word.startswith("$ENGINE")).removeprefix("$ENGINE")
        assert (method, path) in ROUTES, line
        assert any(word.startswith("Authorization: Bearer $(cat $TOKEN_FILE)") for word in words)
        if "-d" in words:
            wire.parse(BODIES[path], words[words.index("-d") + 1].encode())
        seen.add((method, path))
    assert seen == ROUTES


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_curl_lines_revert_block_and_resume_a_running_engine(tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN + "\n")
    header = {"authorization": f"Bearer {TOKEN}"}
    push = {"knobs": {"step_tokens": 64}, "lease_s": 600.0, "expected_revision": 0, "actor": "tuner", "reason": "test"}

    def run(line: str) -> None:
        settings = os.environ | {"ENGINE": server.public, "TOKEN_FILE": str(token_file)}
        subprocess.run(["bash", "-c", line], env=settings, check=True, timeout=60, capture_output=True)

    def state() -> wire.State:
        return wire.parse(wire.State, HTTP.get(f"{server.public}/tuning/v1/state", headers=header).content, 1_000_000)

    revert = next(line for line in curl_lines() if "DELETE" in line)
    resume = next(line for line in curl_lines() if "resume" in line)
    with live(tuning_token=token_file) as server:
        assert HTTP.put(f"{server.public}/tuning/v1/knobs", json=push, headers=header).status_code == 200
        assert state().setting().step_tokens == 64
        run(revert)
        after = state()
        assert after.setting().step_tokens == 512 and after.blocked and after.lease is None
        again = push | {"expected_revision": after.revision}
        assert HTTP.put(f"{server.public}/tuning/v1/knobs", json=again, headers=header).status_code == 409
        run(resume)
        assert not state().blocked
        run(next(line for line in curl_lines() if line.endswith('$TOKEN_FILE)"') and "state" in line))

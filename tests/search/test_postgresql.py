"""Trials in a real PostgreSQL: two workers on one study, one of them killed, and a server that goes away."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState

from rooftune.policies.request import Boot, Setting
from rooftune.policies.slo import Slo, Target
from rooftune.policies.step_time import NAMED_MODELS
from rooftune.tuner.search.space import search_space
from rooftune.tuner.search.study import SettingStudy
from rooftune.tuner.sim.engine import Engine
from tests.cli.commands import write_mix
from tests.search.postgres import Server, postgres
from tests.search.trials import counts

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
START = "import sys; from tests.cli.commands import rooftune; sys.exit(rooftune(*sys.argv[1:]))"
SLO = Slo((Target("ttft", 2.0, 0.99), Target("gap", 0.03, 0.99)))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with postgres() as running:
        yield running


@pytest.fixture(scope="module")
def mix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mix(tmp_path_factory.mktemp("traffic") / "mix.csv")


def worker(server: Server, mix: Path, *, trials: int, study: str) -> "subprocess.Popen[str]":
    words = ["recommend", "--traffic", mix, "--step-model", "8b-2tbs", "--ttft-p99", "2s", "--gap-p99", "30ms"]
    words += ["--trials", trials, "--storage", server.url, "--study", study, "--json", "--quiet"]
    command = [sys.executable, "-c", START, *map(str, words)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def trials_of(server: Server, study: str) -> list[FrozenTrial]:
    """Everything stored under the name; empty before the first worker has come so far."""
    try:
        names = optuna.get_all_study_names(server.url)
    except Exception:  # noqa: BLE001  # the workers are still making the tables
        return []
    found = [name for name in names if name.startswith(f"{study}/")]
    assert len(found) <= 1, "two workers, two studies"
    return optuna.load_study(study_name=found[0], storage=server.url).get_trials() if found else []


def owner(trial: FrozenTrial) -> int:
    return int(trial.user_attrs.get("worker", "none:0").rpartition(":")[2])


def kill_in_mid_trial(victim: "subprocess.Popen[str]", server: Server, study: str) -> int:
    """Kill it while trials of its own are running, some being told already; how many it leaves."""
    until = time.monotonic() + 120.0
    while time.monotonic() < until:
        assert victim.poll() is None, "the victim ended before it could be killed"
        mine = [trial for trial in trials_of(server, study) if owner(trial) == victim.pid]
        if sum(trial.state is TrialState.COMPLETE for trial in mine) >= 6:
            os.kill(victim.pid, signal.SIGSTOP)  # holds still while we look
            left = [trial for trial in trials_of(server, study) if owner(trial) == victim.pid]
            running = sum(trial.state is TrialState.RUNNING for trial in left)
            if running:
                victim.kill()
                victim.wait()
                return running
            os.kill(victim.pid, signal.SIGCONT)
        time.sleep(0.05)
    raise AssertionError("the victim was never in mid-trial")


def answered(process: "subprocess.Popen[str]") -> dict[str, object]:
    out, err = process.communicate(timeout=300)
    assert process.returncode in (0, 1), err
    answer: dict[str, object] = json.loads(out)
    return answer


def test_of_two_workers_on_one_study_one_is_killed_and_the_other_finishes(server: Server, mix: Path) -> None:
    victim = worker(server, mix, trials=2000, study="shop")
    survivor = worker(server, mix, trials=60, study="shop")
    seen = kill_in_mid_trial(victim, server, "shop")
    first = answered(survivor)
    trials = trials_of(server, "shop")
    abandoned = [trial for trial in trials if trial.state is TrialState.RUNNING]
    # Besides the trials with its name there may be one that it had begun but not yet marked.
    left, signed = len(abandoned), [trial for trial in abandoned if owner(trial)]
    assert len(signed) == seen and {owner(trial) for trial in signed} == {victim.pid}
    assert left - seen <= 1 and not any(trial.params for trial in abandoned if trial not in signed)
    finished = [trial for trial in trials if trial.state is TrialState.COMPLETE]
    assert sum(owner(trial) == survivor.pid for trial in finished) == 60
    assert sum(owner(trial) == victim.pid for trial in finished) >= 6
    assert len({trial.number for trial in trials}) == len(trials) == max(trial.number for trial in trials) + 1

    # The study goes on with what both found, and what the dead one left is marked failed once it is old.
    name = next(name for name in optuna.get_all_study_names(server.url) if name.startswith("shop/")).rpartition("/")[0]
    engine = Engine(Boot(16_384, 16, 1, 1, 0, 1), 30_000, 256)
    space = search_space(engine, Setting(2048, max_running=256), SLO, NAMED_MODELS["8b-2tbs"])
    study = SettingStudy(space, sampler="tpe", seed=0, storage=server.url, name=name)
    assert counts(study)["COMPLETE"] == len(finished) and counts(study)["RUNNING"] == left
    assert study.fail_stale(3600.0) == 0
    assert study.fail_stale(0.0) == left
    assert (counts(study)["RUNNING"], counts(study)["FAIL"]) == (0, left)
    best = study.finished()[0]
    assert best.value == max(t.value for t in study.finished() if t.violation == best.violation)

    again = answered(worker(server, mix, trials=5, study="shop"))
    assert again["verdict"] == first["verdict"]
    assert counts(study)["COMPLETE"] == len(finished) + 5


def test_other_traffic_is_another_study_under_the_same_name(server: Server, mix: Path, tmp_path: Path) -> None:
    other = write_mix(tmp_path / "other.csv", requests=100, seed=2)
    for traffic in (mix, other):
        answered(worker(server, traffic, trials=4, study="both"))
    names = [name for name in optuna.get_all_study_names(server.url) if name.startswith("both/")]
    assert len(names) == 2
    assert all(len(optuna.load_study(study_name=name, storage=server.url).trials) >= 4 for name in names)


def test_a_lost_database_server_ends_the_search_with_one_line(server: Server, mix: Path) -> None:
    process = worker(server, mix, trials=2000, study="cut")
    until = time.monotonic() + 120.0
    while len(trials_of(server, "cut")) < 6 and time.monotonic() < until:
        time.sleep(0.05)
    server.stop()
    try:
        out, err = process.communicate(timeout=120)
    finally:
        server.start()
    assert process.returncode == 3 and out == ""
    assert len(err.strip().splitlines()) == 1 and "database" in err
    assert len(trials_of(server, "cut")) >= 6  # and what was told is still there

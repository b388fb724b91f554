"""Cases from the field on Optuna: failed values, nothing feasible, repeats, a grid that widens, one file for two.

Each enters through the command or a study, and the test asserts the action and its code.
"""

import json
import math
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rooftune.policies.errors import UnreachableError
from rooftune.policies.request import Boot, Setting
from rooftune.policies.slo import Slo, Target
from rooftune.policies.step_time import NAMED_MODELS
from rooftune.tuner.search import arena
from rooftune.tuner.search import study as study_module
from rooftune.tuner.search.evaluation import Advice, Case, Evaluation, Role
from rooftune.tuner.search.objective import evaluate
from rooftune.tuner.search.space import EVERYTHING, SearchSpace, search_space
from rooftune.tuner.search.study import SettingStudy
from rooftune.tuner.sim.engine import Engine
from rooftune.tuner.traffic.generate import document_mix
from tests.cli.commands import rooftune, write_mix
from tests.search.trials import counts

ROOT = Path(__file__).parents[2]
MODEL = NAMED_MODELS["8b-2tbs"]
SLO = Slo((Target("ttft", 2.0, 0.99), Target("gap", 0.03, 0.99)))
BASE = Setting(2048, max_running=64)
WARM_STARTS = 6  # setting in force, formula, knee, best three of the sweep
START = "import sys; from tests.cli.commands import rooftune; sys.exit(rooftune(*sys.argv[1:]))"


def engine(ceiling: int = 2048) -> Engine:
    return Engine(Boot(ceiling, 16, 1, 1, 0, 1), 600_000 // 16, 64)


def space(ceiling: int = 2048, slo: Slo = SLO, **more: Any) -> SearchSpace:
    return search_space(engine(ceiling), BASE, slo, MODEL, **more)


@pytest.fixture(scope="module")
def mix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mix(tmp_path_factory.mktemp("traffic") / "mix.csv", requests=200)


@pytest.fixture(scope="module")
def evaluation() -> Evaluation:
    return evaluate(Case(document_mix(1, 3.0, 10.0, 10, (4_000, 8_000)), engine(), MODEL, SLO), BASE, Role.SEARCH)[0]


def command(mix: Path, *more: object) -> list[object]:
    words = ["recommend", "--traffic", mix, "--step-model", "8b-2tbs", "--trials", "8", "--json", "--quiet"]
    targets = [] if "--ttft-p99" in more else ["--ttft-p99", "2s", "--gap-p99", "30ms"]
    return [*words, *targets, *more]


def states(path: Path) -> list[Counter[str]]:
    """Trials by state, for each study in a SQLite file in order of their making."""
    with sqlite3.connect(path) as connection:
        rows = connection.execute("select study_id, state from trials").fetchall()
        studies = [number for (number,) in connection.execute("select study_id from studies order by study_id")]
    return [Counter(state for study_id, state in rows if study_id == number) for number in studies]


def test_48_a_nan_value_fails_its_trial(tmp_path: Path, evaluation: Evaluation) -> None:
    study = SettingStudy(space(), sampler="tpe", seed=0, storage=f"sqlite:///{tmp_path / 'trials.db'}")
    for bad in (math.nan, math.inf, -math.inf):
        study.tell(study.ask(), evaluation, bad)
    assert (counts(study)["FAIL"], counts(study)["RUNNING"]) == (3, 0)
    assert study.finished() == []  # nothing to take for the best, and nothing raised
    study.tell(study.ask(), evaluation, 0.5)
    assert [reported.value for reported in study.finished()] == [0.5]
    assert states(tmp_path / "trials.db") == [Counter(FAIL=3, COMPLETE=1)]


@pytest.fixture
def twin_without_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every replay but that of the setting in force gives NaN."""

    def broken(*given: Any) -> tuple[Evaluation, object]:
        found, result = evaluate(*given)
        return replace(found, attainment=math.nan, goodput_rps=math.nan, tokens_per_s=math.nan), result

    monkeypatch.setattr(arena, "evaluate", broken)


@pytest.mark.slow
def test_48_when_no_trial_completes_the_setting_in_force_is_kept(
    mix: Path, tmp_path: Path, twin_without_numbers: None, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trials.db"
    assert rooftune(*command(mix, "--storage", f"sqlite:///{path}", "--current-budget", "1024")) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["verdict"] == Advice.KEEP
    assert record["best"]["setting"] == record["current"]["setting"]
    assert record["best"]["setting"]["step_tokens"] == 1024
    assert states(path) == [Counter(FAIL=8)]


def test_49_when_nothing_is_feasible_the_nearest_setting_is_named_and_flagged(
    mix: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rooftune(*command(mix, "--ttft-p99", "2s", "--gap-p99", "9ms")) == 1
    record = json.loads(capsys.readouterr().out)
    assert record["verdict"] == Advice.INFEASIBLE
    tried = [e for e in record["trials"] if e["whole_traffic"]]
    assert tried and not any(e["feasible"] for e in tried)
    assert record["best"]["attainment"] >= max(e["attainment"] for e in tried) - 0.002
    assert max(margin["margin"] for margin in record["best"]["margins"]) > 0.0


def test_49_a_study_without_a_feasible_trial_still_ranks_them(evaluation: Evaluation) -> None:
    study = SettingStudy(space(), sampler="tpe", seed=0)
    reported = {}
    for number in range(12):
        ticket = study.ask()
        reported[ticket.setting] = number / 100.0
        rows = tuple(replace(row, margin=0.5) for row in evaluation.margins)
        study.tell(ticket, replace(evaluation, margins=rows, missed=(0.5 - number / 100.0,) * len(rows)), number / 100)
    best = study.finished()[0]
    assert not best.feasible and best.violation == pytest.approx(2 * 10.0 * (0.5 - 0.11))
    assert reported[best.setting] == 0.11


@pytest.mark.slow
def test_51_repeats_are_not_paid_twice_and_count_as_trials(mix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = ("--ceiling", "64", "--max-seqs", "32", "--trials", "120", "--current-budget", "64")
    assert rooftune(*command(mix, *tiny)) in (0, 1)
    record = json.loads(capsys.readouterr().out)
    searched = [e for e in record["trials"] if e["role"] == Role.SEARCH]
    settings = [(e["setting"]["step_tokens"], e["setting"]["chunk_cap_tokens"]) for e in searched]
    grid = {(budget, cap) for budget in range(32, 65, 8) for cap in (0, *range(16, budget, 8))}
    assert record["search"]["trials"] == 120 > len(grid) >= len(set(settings))
    assert set(settings) <= grid
    # Each point of the grid is simulated at most once, and not again when the baselines had it.
    steps = {point: e["simulated_steps"] for point, e in zip(settings, searched, strict=True)}
    assert record["search"]["simulated_steps"] <= sum(steps.values())


@pytest.mark.slow
def test_53_a_wider_grid_keeps_its_history(mix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trials.db"
    shared = ("--storage", f"sqlite:///{path}", "--study", "shop", "--max-seqs", "64", "--current-budget", "128")
    for ceiling in (256, 2048, 128):  # wider, and then narrower than what the history holds
        assert rooftune(*command(mix, *shared, "--ceiling", ceiling)) in (0, 1)
        record = json.loads(capsys.readouterr().out)
        assert record["best"]["setting"]["step_tokens"] <= ceiling
    assert states(path) == [Counter(COMPLETE=24)]


@pytest.mark.slow
def test_53_changed_choices_start_another_study_beside_the_old_one(tmp_path: Path, evaluation: Evaluation) -> None:
    storage = f"sqlite:///{tmp_path / 'trials.db'}"
    batch = Slo((Target("ttft", 2.0, 0.99),))  # no gap target, so no step-time target to choose
    for slo in (batch, SLO, batch):
        study = SettingStudy(space(slo=slo, knobs=EVERYTHING), sampler="tpe", seed=0, storage=storage, name="live")
        for _ in range(3):
            study.tell(study.ask(), evaluation, 0.5)
    assert states(tmp_path / "trials.db") == [Counter(COMPLETE=6), Counter(COMPLETE=3)]


def hold(path: Path, seconds: float) -> threading.Thread:
    """Keep every writer out of a SQLite file for a while; returns once it does."""
    held = threading.Event()

    def keep() -> None:
        with sqlite3.connect(path, isolation_level=None) as connection:
            connection.execute("begin exclusive")
            held.set()
            threading.Event().wait(seconds)
            connection.execute("rollback")

    thread = threading.Thread(target=keep)
    thread.start()
    assert held.wait(10.0)
    return thread


@pytest.mark.slow
def test_47_a_study_waits_out_another_process_lock(
    tmp_path: Path, evaluation: Evaluation, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trials.db"
    for wait_s in (study_module.LOCK_WAIT_S, 0):  # waits for it; is refused, and tries again
        monkeypatch.setattr(study_module, "LOCK_WAIT_S", wait_s)
        study = SettingStudy(space(), sampler="tpe", seed=0, storage=f"sqlite:///{path}", name="live")
        thread = hold(path, 0.2)
        study.tell(study.ask(), evaluation, 0.5)
        thread.join()
    assert counts(study)["COMPLETE"] == 2


@pytest.mark.slow
def test_47_a_lock_that_never_ends_is_one_clear_error(
    tmp_path: Path, evaluation: Evaluation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study_module, "LOCK_WAIT_S", 0)
    path = tmp_path / "trials.db"
    study = SettingStudy(space(), sampler="tpe", seed=0, storage=f"sqlite:///{path}", name="live")
    thread = hold(path, 6.0)
    with pytest.raises(UnreachableError, match="locked") as caught:
        study.ask()
    thread.join()
    assert caught.value.exit_code == 3
    study.tell(study.ask(), evaluation, 0.5)  # and it goes on afterwards
    assert counts(study)["COMPLETE"] == 1


@pytest.mark.slow
def test_47_several_controllers_may_create_one_file_at_once(mix: Path, tmp_path: Path) -> None:
    path = tmp_path / "trials.db"
    words: Sequence[object] = command(mix, "--storage", f"sqlite:///{path}", "--study", "shop")
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", START, *map(str, words)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for _ in range(4)
    ]
    ends = [(worker.communicate(timeout=300), worker.returncode) for worker in workers]
    assert all(code in (0, 1) for _, code in ends), [(code, err[-600:]) for (_, err), code in ends]
    (found,) = states(path)
    # SQLite locks no rows, so two workers may run the same warm start; its trial is reported once.
    assert 4 * 8 - 3 * WARM_STARTS <= found["COMPLETE"] <= 4 * 8
    assert set(found) == {"COMPLETE"}

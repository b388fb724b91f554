"""Cases of part A that the search by itself has to get right, entered through a study."""

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from rooftune.policies.request import Boot, Setting
from rooftune.policies.slo import MarginReason, MarginRow, Slo, Target
from rooftune.policies.step_time import NAMED_MODELS
from rooftune.tuner.model.model_file import ModelFile, write_model_file
from rooftune.tuner.search.evaluation import Case, Evaluation, Role
from rooftune.tuner.search.objective import evaluate
from rooftune.tuner.search.space import search_space
from rooftune.tuner.search.study import Finished, SettingStudy
from rooftune.tuner.sim.engine import Engine
from rooftune.tuner.traffic.generate import document_mix
from tests.cli.commands import rooftune
from tests.search.trials import counts

ENGINE = Engine(Boot(2048, 16, 1, 1, 0, 1), 600_000 // 16, 64)
BASE = Setting(2048, max_running=64)
MODEL = NAMED_MODELS["8b-2tbs"]
SLO = Slo((Target("ttft", 2.0, 0.99), Target("gap", 0.03, 0.99)))
# Partial-prefill cap (0: none) -> mean and p99 of the TTFT in seconds, as reported from one L4.
REPORTED = {0: (0.722, 3.597), 1: (0.750, 4.074), 4: (0.539, 6.348), 8: (0.470, 3.980)}


@pytest.fixture(scope="module")
def blank() -> Evaluation:
    found = evaluate(Case(document_mix(1, 3.0, 5.0, 10, (4_000, 8_000)), ENGINE, MODEL, SLO), BASE, Role.SEARCH)[0]
    return replace(found, margins=(), missed=())


def searched(blank: Evaluation, column: int, seed: int, trials: int = 30) -> tuple[list[Finished], Counter[int]]:
    """A search over the cap alone, given one column of the reported values; a cap without a report fails."""
    space = search_space(ENGINE, BASE, SLO, MODEL, knobs=frozenset({"max_partial_prefills"}))
    study, proposed = SettingStudy(space, sampler="tpe", seed=seed), Counter[int]()
    for _ in range(trials):
        ticket = study.ask()
        cap = ticket.setting.max_partial_prefills
        proposed[cap] += 1
        study.tell(ticket, blank, -REPORTED[cap][column] if cap in REPORTED else math.nan)
    return study.finished(), proposed


@pytest.mark.parametrize(("column", "best"), [(0, 8), (1, 0)], ids=["mean", "p99"])
def test_6_a_non_monotone_tail_is_not_treated_as_monotone(blank: Evaluation, column: int, best: int) -> None:
    for seed in range(3):
        reported, proposed = searched(blank, column, seed)
        assert reported[0].setting.max_partial_prefills == best
        assert set(proposed) >= set(REPORTED)  # every cap was tried, whatever its neighbours' results
        assert reported[0].value == -REPORTED[best][column]


def test_8_no_limit_reaches_the_target_so_the_nearest_is_named_and_flagged(blank: Evaluation) -> None:
    """TPOT of 0.1 s wanted; reported were 0.441 s without a limit and 0.179 s at best."""
    tpot_s = {0: 0.438, 1024: 0.282, 512: 0.232, 256: 0.179}
    target = Target("tpot", 0.1, 0.99)
    study = SettingStudy(search_space(ENGINE, BASE, SLO, MODEL), sampler="tpe", seed=0)
    study.enqueue(BASE._replace(chunk_cap_tokens=2048))  # as large as the budget: the same point as no limit
    for cap in tpot_s:
        study.enqueue(BASE._replace(chunk_cap_tokens=cap))
    assert counts(study)["WAITING"] == len(tpot_s)
    for seen_s in tpot_s.values():
        ticket = study.ask()
        assert tpot_s[ticket.setting.chunk_cap_tokens] == seen_s
        row = MarginRow(target, None, seen_s, seen_s / 0.1 - 1.0, 100, MarginReason.MEASURED)
        study.tell(ticket, replace(blank, margins=(row,), missed=(min(1.0, (seen_s - 0.1) / 0.4),)), -seen_s)
    best = study.finished()[0]
    assert not best.feasible and best.setting.chunk_cap_tokens == 256 and best.value == -0.179


def test_18_the_first_proposal_follows_from_prefill_speed_and_target_not_from_a_small_step_down(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """2,400 prompt tokens a second, budget 8,192: steps of 3.4 s. Two cold prompts of 72,000 beside decodes."""
    model = MODEL._replace(overhead_s=0.0, floor_s=0.02, slope_s_per_token=1.0 / 2400.0, attention_s=0.0)
    write_model_file(tmp_path / "model.json", ModelFile(model, "a case"))
    chats = [(float(second), 200, 60) for second in range(60)]
    rows = sorted([*chats, (5.0, 72_000, 50), (6.0, 72_000, 50)])
    lines = ["arrival_s,prompt_tokens,output_tokens", *(f"{a},{p},{o}" for a, p, o in rows)]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    words = ("--traffic", tmp_path / "t.csv", "--step-model", tmp_path / "model.json", "--json", "--quiet")
    proposed = ("--trials", 8, "--ceiling", 8192, "--max-seqs", 64, "--current-budget", 8192, "--gap-p99", "200ms")
    assert rooftune("recommend", *words, *proposed) in (0, 1)
    record = json.loads(capsys.readouterr().out)
    formula = [t for t in record["trials"] if t["role"] == Role.FORMULA]
    assert len(formula) == 1 and 64 <= formula[0]["setting"]["step_tokens"] <= 480
    assert record["best"]["setting"]["step_tokens"] <= 480

"""Rows of the protocol as figures and as a twin: a run of the twin itself, written as an engine's rows."""

import csv
import gzip
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rooftune.policies import wire
from rooftune.policies.errors import RefusedError
from rooftune.policies.quantiles import weighted_quantile
from rooftune.policies.request import Boot, FloatArray, Setting
from rooftune.policies.step_time import StepModel
from rooftune.tuner.bench.live_gain_rounds import Sizes, listed
from rooftune.tuner.model.samples import join
from rooftune.tuner.observe.rows import RequestRows, StepRows
from rooftune.tuner.sim.engine import Engine
from rooftune.tuner.sim.result import RunResult
from rooftune.tuner.sim.twin import simulate
from rooftune.tuner.traffic.workload import Traffic
from tests.bench.vllm_prediction import FULL, SHORT, Size, engine_of, name_of
from tests.bench.vllm_prediction_twin import (
    FIGURES,
    figures_of,
    follows,
    judged,
    learn,
    outcomes,
    predictions,
    stamps,
    step_mape,
    traffic_of,
)
from tests.bench.vllm_sweep import ENGINE as RECORDED
from tests.bench.vllm_sweep_data import cases
from tests.bench.vllm_sweep_judge import Judged
from tests.ports.samples import state

MODEL = StepModel(0.002, 1e-4, 0.004, 0.0, 1e-4, 0.0, 0.0)
ENGINE = Engine(Boot(2048, 16, chunking=1, reserve_whole_prompt=1, contents=0, keep_decodes_moving=1), 100_000, 64)
SETTING = Setting(512, max_running=64)


def made_traffic(span_s: float = 20.0) -> Traffic:
    return listed(Sizes((20, 120), (1000, 3000), (8, 64)), 8.0, span_s, seed=5)


def rows_of(run: RunResult, traffic: Traffic) -> tuple[StepRows, RequestRows]:
    """The rows an engine would have recorded; the run must have kept its log."""
    done: dict[int, int] = defaultdict(int)
    rows: list[tuple[float, ...]] = []
    end_s = 0.0
    for step in np.unique(run.log[:, 0]).tolist():
        mine = np.flatnonzero(run.log[:, 0] == step)
        start_s = max(end_s, min(float(traffic.arrival_s[r]) for r in run.log[mine, 1].tolist()))
        end_s = float(run.log_times_s[mine[0]])
        prefill = decode = prefills = context = prefix = 0
        work = 0.0
        for _, request, tokens in run.log[mine].tolist():
            before = done[request]
            if before < int(traffic.prompt_tokens[request]):
                prefill, prefills, prefix = prefill + tokens, prefills + 1, prefix + before
                work += tokens * (before + tokens / 2)
            else:
                decode, context = decode + tokens, context + before
            done[request] = before + tokens
        rows.append((step, start_s, end_s - start_s, 512, prefill, decode, len(mine), prefills, context, prefix, work,
                     0, 0, 0, 0.0, 0, 0))  # fmt: skip
    columns = [np.array(column) for column in zip(*rows, strict=True)]
    names = StepRows.__dataclass_fields__
    steps = StepRows(**{
        name: column.astype(np.int64 if kind.type is wire.Whole else np.float64)
        for (name, kind), column in zip(names.items(), columns, strict=True)
    })  # fmt: skip
    found, order = run.outcomes, np.argsort(run.outcomes.finish_s, kind="stable")
    plain = np.zeros(len(traffic), dtype=np.int64)
    requests = RequestRows(
        sequence=np.arange(len(traffic)), arrival_s=found.arrival_s[order], scheduled_s=found.scheduled_s[order],
        ttft_s=(found.first_token_s - found.arrival_s)[order], finish_s=found.finish_s[order],
        prompt_tokens=found.prompt_tokens[order], cached_tokens=plain, output_tokens=found.output_tokens[order],
        gap_count=found.gap_count[order], longest_gap_s=found.longest_gap_s[order], preemptions=plain, ended=plain,
        gap_over=np.zeros((len(traffic), 0), dtype=np.int64),
    )  # fmt: skip
    return steps, requests


@pytest.fixture(scope="module")
def traffic() -> Traffic:
    return made_traffic()


@pytest.fixture(scope="module")
def twin_rows(traffic: Traffic) -> tuple[StepRows, RequestRows]:
    return rows_of(simulate(traffic, ENGINE, SETTING, MODEL, keep_log=True), traffic)


def test_figures_from_rows_are_those_of_the_run(traffic: Traffic, twin_rows: tuple[StepRows, RequestRows]) -> None:
    """Gaps follow exactly from the steps alone."""
    ran = simulate(traffic, ENGINE, SETTING, MODEL).outcomes
    measured = outcomes(*twin_rows)
    assert measured.gap_weights.sum() == ran.gap_weights.sum()
    for q in (0.2, 0.5, 0.8, 0.9, 0.95, 1.0):
        expected = weighted_quantile(ran.gap_values_s, ran.gap_weights, q)
        assert weighted_quantile(measured.gap_values_s, measured.gap_weights, q) == pytest.approx(expected, rel=1e-9)
    assert figures_of(measured) == pytest.approx(figures_of(ran), rel=1e-9)
    again = traffic_of(measured)
    assert again.prompt_tokens.tolist() == traffic.prompt_tokens.tolist()
    assert again.arrival_s.tolist() == traffic.arrival_s.tolist()


def test_rows_that_do_not_add_up_are_refused(twin_rows: tuple[StepRows, RequestRows]) -> None:
    steps, requests = twin_rows
    kept = np.ones(len(steps), dtype=np.bool_)
    kept[np.flatnonzero(steps.decode_tokens)[5]] = False
    with pytest.raises(RefusedError, match="rows are missing"):
        outcomes(steps.select(kept), requests)
    ended = requests.ended.copy()
    ended[3] = 1
    with pytest.raises(RefusedError, match="did not finish"):
        outcomes(steps, replace(requests, ended=ended))


def test_a_step_follows_if_a_request_of_the_previous_one_continues(twin_rows: tuple[StepRows, RequestRows]) -> None:
    steps, requests = twin_rows
    idle = steps.start_s[1:] > steps.end_s[:-1] + 1e-9
    assert idle.any() and not idle.all()
    found = follows(steps, requests)
    assert not found[0] and not found[1:][idle].any(), "a step after idle time follows nothing"
    # One that starts at once follows, unless a request arrived at the instant at which the last one ended.
    assert found[1:][~idle].mean() > 0.99
    of_requests, of_steps = stamps(steps, requests)
    assert (of_steps.end_s[:-1] <= of_steps.start_s[1:]).all() and len(of_requests.arrival_s) == len(requests)


def test_one_budget_predicts_the_others(traffic: Traffic, twin_rows: tuple[StepRows, RequestRows]) -> None:
    """Without scatter and without time outside the step a prediction is nearly exact."""
    twin = learn(*twin_rows, seeds=2)
    assert twin.outside.before_s < 1e-6 and twin.outside.host_s < 1e-6
    assert step_mape(twin, join([twin_rows[0].samples()])) < 0.01
    for setting in (Setting(128, max_running=64), Setting(2048, chunk_cap_tokens=256, max_running=64)):
        truth = figures_of(simulate(traffic, ENGINE, setting, MODEL).outcomes)
        rows = list(judged("x", predictions(twin, traffic, ENGINE, setting), [truth]))
        assert [row.name for row in rows] == list(FIGURES)
        assert max(abs(row.error) for row in rows) < 0.05
        slower = list(judged("x", predictions(twin, traffic, ENGINE, setting, speed=1.3), [truth]))
        assert min(row.error for row in slower) > 0.1, "a slower machine is another prediction"


def test_repeats_give_their_mean_and_spread() -> None:
    measured = [dict.fromkeys(FIGURES, value) for value in (0.8, 1.2)]
    rows = list(judged("b128", [dict.fromkeys(FIGURES, 1.55)], measured))
    assert all(row.measured == pytest.approx(1.0) and row.spread == pytest.approx(0.4) for row in rows)
    assert all(row.error == pytest.approx(0.55) and not row.out_of_bounds for row in rows), "within 1.5 x 0.4"
    assert all(row.out_of_bounds for row in judged("b128", [dict.fromkeys(FIGURES, 1.65)], measured))


def test_the_twins_engine_matches_the_hooks_state() -> None:
    engine = engine_of(state())
    assert engine.boot.ceiling_tokens == 512 and engine.boot.block_tokens == 16 and engine.boot.keep_decodes_moving == 1
    assert engine.kv_blocks == 100 and engine.sequence_ceiling == 8
    unknown = state(envelope=state().envelope.model_dump() | {"kv_blocks": None, "kv_block_tokens": None})
    assert engine_of(unknown).kv_blocks > 100_000


@pytest.mark.parametrize("size", [SHORT, FULL])
def test_predicted_runs_are_not_fitted(size: Size) -> None:
    names: Sequence[str] = [name_of(setting) for setting in size.others]
    assert "b512" not in names and len(set(names)) == len(names)
    if size is FULL:
        assert sum("cap" in name for name in names) == 2 and len(names) == 6 and size.repeats == 2


def _floats(rows: list[dict[str, str]], name: str) -> FloatArray:
    return np.array([float(row[name]) for row in rows])


def recorded(folder: Path, run: str) -> tuple[StepRows, RequestRows]:
    """A recorded run of a real vLLM as rows of the protocol."""
    with gzip.open(folder / f"{run}.steps.csv.gz", "rt") as file:
        read = list(csv.DictReader(file))
    column = {name: _floats(read, name) for name in read[0] if read[0][name] != ""}
    empty = np.zeros(len(read), dtype=np.int64)
    whole = {name: values.astype(np.int64) for name, values in column.items()}
    steps = StepRows(
        step=np.arange(len(read)), start_s=column["start_s"], duration_s=column["dur_ms"] / 1e3, budget_tokens=empty,
        prefill_tokens=whole["prefill"], decode_tokens=whole["decode"],
        sequences=whole["decode"] + whole["prefill_reqs"], prefills=whole["prefill_reqs"],
        decode_context_tokens=whole["ctx_decode"], prefill_context_tokens=whole["ctx_prefill"],
        attention_work=column["att"], partial_prefills=empty, running=empty, waiting=empty,
        kv_used=np.zeros(len(read)), preemptions=empty, revision=empty,
    )  # fmt: skip
    with gzip.open(folder / f"{run}.requests.jsonl.gz", "rt") as file:
        listed_rows = sorted(map(json.loads, file), key=lambda row: row["last_s"])
    n = len(listed_rows)
    seen = {name: np.array([row[name] for row in listed_rows]) for name in ("arrival_s", "first_sched_s", "first_s")}
    none = np.zeros(n, dtype=np.int64)
    requests = RequestRows(
        sequence=np.arange(n), arrival_s=seen["arrival_s"], scheduled_s=seen["first_sched_s"],
        ttft_s=seen["first_s"] - seen["arrival_s"], finish_s=np.array([row["last_s"] for row in listed_rows]),
        prompt_tokens=np.array([row["prompt"] for row in listed_rows]), cached_tokens=none,
        output_tokens=np.array([row["out"] for row in listed_rows]),
        gap_count=np.array([len(row["gaps_ms"]) for row in listed_rows]),
        longest_gap_s=np.array([max(row["gaps_ms"], default=np.nan) / 1e3 for row in listed_rows]), preemptions=none,
        ended=none, gap_over=np.zeros((n, 0), dtype=np.int64),
    )  # fmt: skip
    return steps, requests


@pytest.mark.slow
def test_a_recorded_real_run_predicts_the_others(shared_data: Path) -> None:
    """The mixed list under budget 512, the same settings as the bench and 4,096: every figure within its bounds."""
    folder = shared_data / "vllm-cpu-sweep"
    fitted = recorded(folder, "b_512_t0_r1")
    twin, traffic = learn(*fitted, seeds=8), traffic_of(outcomes(*fitted))
    rows: list[Judged] = []
    for case, runs in cases().items():
        if case.traffic == "b" and case.budget != 512:
            measured = [figures_of(outcomes(*recorded(folder, run))) for run in runs]
            rows += judged(case.name, predictions(twin, traffic, RECORDED, case.setting), measured)
    assert len(rows) == 30
    assert np.median([abs(row.error) for row in rows]) <= 0.10
    assert not [row for row in rows if row.out_of_bounds]

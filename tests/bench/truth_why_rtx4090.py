"""Why the RTX 4090 run is predicted as it is: each mechanism taken away in turn (figures of decisions 010 and 011)."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from rooftune.policies.commands import Figure
from rooftune.policies.request import Boot, FloatArray
from rooftune.policies.step_time import AttentionTable, StepCost
from rooftune.tuner.model.profile import JUDGED_STEPS, LayerProfile, read_profile, steps_of
from tests.bench.rtx4090 import NUDGES_BLOCKS, quantile_errors, replay, worst
from tests.bench.rtx4090_data import FOLDER, LAYERS, ServedRun, read_run
from tests.bench.step_table import fit_table

CONSTANTS_S = (0.00005, 0.0001)


def why_rtx4090() -> Iterator[Figure]:
    """Worst quantile error (fraction) without each mechanism, the effect of luck, and forms of the step model."""
    run, profile = read_run(), read_profile(FOLDER, LAYERS)
    cost, boot = profile.cost, run.engine.boot
    yield _worst("rtx4090_worst", run, cost)
    yield _worst("rtx4090_worst_blocks_not_found_again", _with_boot(run, boot._replace(contents=0)), cost)
    yield Figure("rtx4090_worst_null_block_counted", worst(quantile_errors(run, replay(run, cost, 1))), "fraction")
    yield _worst("rtx4090_worst_planned_afterwards", _with_boot(run, boot._replace(plan_ahead=0)), cost)
    yield _worst("rtx4090_worst_client_clock", _by_client_clock(run), cost)
    for constant_s in CONSTANTS_S:
        slower = cost._replace(base_s=cost.base_s + constant_s)
        yield _worst(f"rtx4090_worst_with_{1e6 * constant_s:.0f}us_a_step", run, slower)
    usual = quantile_errors(run, replay(run, cost))["ttft"]
    for name, other in (("parts_added", added(cost.attention)), ("unpadded", _unpadded(profile))):
        changed = cost._replace(attention=other) if isinstance(other, AttentionTable) else other
        moved = quantile_errors(run, replay(run, changed))["ttft"] - usual
        yield Figure(f"rtx4090_ttft_{name}", float(moved[np.argmax(np.abs(moved))]), "fraction, largest change")
    nudged = [worst(quantile_errors(run, replay(run, cost, nudge))) for nudge in NUDGES_BLOCKS]
    yield Figure("rtx4090_nudged_worst_min", min(nudged), "fraction")
    other_steps = steps_of(cost, JUDGED_STEPS, 1)
    table = fit_table(profile.steps, profile.fit.model)
    yield Figure("rtx4090_step_mape_formula", profile.formula_mape, "fraction")
    yield Figure("rtx4090_step_mape_table", table.mape(other_steps), "fraction")


def _worst(name: str, run: ServedRun, cost: StepCost) -> Figure:
    return Figure(name, worst(quantile_errors(run, replay(run, cost))), "fraction")


def _with_boot(run: ServedRun, boot: Boot) -> ServedRun:
    return replace(run, engine=replace(run.engine, boot=boot))


def _stamps(name: str) -> FloatArray:
    lines = (FOLDER / "requests.jsonl").read_text(encoding="utf-8").splitlines()
    return np.array([json.loads(line)[name] for line in lines], dtype=np.float64)


def _by_client_clock(run: ServedRun) -> ServedRun:
    """Arrivals by the client's clock instead of the engine's."""
    arrival = _stamps("arrival_time")
    return replace(run, traffic=replace(run.traffic, arrival_s=np.maximum.accumulate(arrival - arrival[0])))


def added(table: AttentionTable) -> AttentionTable:
    """A table in which decodes cost the same whether or not prompt tokens share their step."""
    alone, prompts = table.time_s[0, 0], table.time_s[:, :, 0, 0]
    return table._replace(time_s=np.ascontiguousarray(prompts[:, :, None, None] + alone[None, None] - alone[0, 0]))


def _unpadded(profile: LayerProfile) -> StepCost:
    """Prices without the padding of CUDA graphs: the same profile without the engine's capture sizes."""
    with TemporaryDirectory() as folder:
        for name in ("dense.csv", "per_sequence.csv", "attention.csv"):
            (Path(folder) / name).write_bytes((FOLDER / name).read_bytes())
        return read_profile(folder, profile.layers).cost

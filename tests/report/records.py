"""A small record whose numbers follow simple formulas, so that a rendering can be checked by eye."""

import json
from typing import Any

from pydantic import ValidationError

from rooftune.policies.step_time import NAMED_MODELS
from rooftune.tuner.record import RunRecord, first_problem

BUDGETS = (256, 512, 640, 768, 1024, 2048, 4096, 8192)
GAP_BOUND_S, TTFT_BOUND_S = 0.03, 2.0


def trial(role: str, budget: int, cap: int = 0, **changed: Any) -> dict[str, Any]:
    """A gap that grows with the budget, a TTFT that falls with it; both targets are met from 640 to 768 tokens."""
    gap_s = round(0.0015 + 4e-5 * (min(budget, cap * 4) if cap else budget), 6)
    ttft_s = round(1280.0 / budget + 0.05 * bool(cap), 6)
    margins = [
        {"measured_s": ttft_s, "margin": ttft_s / TTFT_BOUND_S - 1, "samples": 1000},
        {"measured_s": gap_s, "margin": gap_s / GAP_BOUND_S - 1, "samples": 200_000},
    ]
    met = [row["margin"] <= 0 for row in margins]
    share = 0.98 if all(met) else 0.6 if any(met) and gap_s < 0.06 else 0.1
    return {
        "role": role,
        "setting": {"step_tokens": budget, "chunk_cap_tokens": cap, "max_running": 256},
        "margins": margins,
        "feasible": all(met),
        "attainment": share,
        "goodput_rps": share * 10,
        "tokens_per_s": 2000.0,
        "violation": sum(max(row["margin"], 0.0) for row in margins),
        "ttft_p50_s": ttft_s / 4,
        "ttft_p95_s": ttft_s / 2,
        "ttft_p99_s": ttft_s,
        "gap_p50_s": 0.0105,
        "gap_p99_s": gap_s,
        "longest_gap_p99_s": gap_s * 1.1,
        "tpot_p95_s": 0.02,
        "longest_wait_s": ttft_s * 2,
        "simulated_steps": 30_000,
        "preempted": 0,
        "refused": 0,
        "whole_traffic": True,
        **changed,
    }


def figures(share: float, of: dict[str, Any]) -> dict[str, Any]:
    """A group's figures: the latencies of the whole run, so that no two tables disagree."""
    names = ("ttft_p50_s", "ttft_p99_s", "longest_gap_p99_s", "longest_wait_s")
    return {"attainment": share, "unfinished": 0} | {name: of[name] for name in names}


def bars(budget: int, steps: int = 30) -> dict[str, Any]:
    """Steps of 30 decodes; every third reads a prompt up to the budget."""
    prefill = [budget - 30 if index % 3 == 0 else 0 for index in range(steps)]
    took = [round(0.0015 + max(0.008, 4e-5 * (30 + tokens)), 6) for tokens in prefill]
    return {
        "start_s": [round(10.0 + sum(took[:index]), 6) for index in range(steps)],
        "duration_s": took,
        "steps": [1] * steps,
        "decode_tokens": [30.0] * steps,
        "prefill_tokens": [float(tokens) for tokens in prefill],
        "longest_s": took,
    }


def record_values(**changed: Any) -> dict[str, Any]:
    """The record as JSON values; ``changed`` replaces keys at the top."""
    sweep = [trial("sweep", budget) for budget in BUDGETS]
    tried = [trial("search", budget, cap) for budget in (512, 640, 704, 2048) for cap in (0, 64, 128)]
    random = [trial("random", budget, cap) for budget in (384, 1536, 6000) for cap in (0, 256)]
    random[-1]["ttft_p99_s"] = "inf"
    glances = [
        trial("search", budget, cap, whole_traffic=False, goodput_rps=None, tokens_per_s=None, simulated_steps=900)
        for budget in (448, 896)
        for cap in (96, 160)
    ]
    tokens = [1, 200, 512, 1024, 2048, 2560]
    values: dict[str, Any] = {
        "schema": "rooftune.run-record",
        "version": 2,
        "made_at": "2026-11-29T12:00:00+00:00",
        "made_by": "0.1.0",
        "verdict": "change",
        "objective": "goodput",
        "profile": None,
        "targets": [
            {"metric": "ttft", "quantile": 0.99, "bound_s": TTFT_BOUND_S, "applies_to": "all requests"},
            {"metric": "gap", "quantile": 0.99, "bound_s": GAP_BOUND_S, "applies_to": "all requests"},
        ],
        "traffic": {
            "name": "chat <day> & night.csv",
            "changes": ["arrivals 1.8 times as fast"],
            "requests": 1000,
            "span_s": 100.0,
            "prompt_p50_tokens": 700,
            "prompt_p99_tokens": 4000,
            "prompt_max_tokens": 9000,
            "output_p50_tokens": 150,
            "output_p99_tokens": 800,
            "output_max_tokens": 1000,
            "prompt_share_cached": 0.0,
            "tenants": 2,
            "source": "given",
        },
        "step_model": {
            "name": "8b-2tbs",
            "source": "assumed",
            "origin": "teaching values, calculated and not measured on any hardware",
            "coefficients": dict(NAMED_MODELS["8b-2tbs"]._asdict()),
            "knee_tokens": 200.0,
            "codes": [],
            "errors": {},
        },
        "engine": {
            "ceiling_tokens": 8192,
            "kv_tokens": 600_000,
            "block_tokens": 16,
            "max_seqs": 256,
            "prefix_caching": True,
            "decodes_kept_moving": False,
            "sources": {
                "ceiling_tokens": "assumed",
                "kv_tokens": "given",
                "block_tokens": "assumed",
                "max_seqs": "assumed",
                "prefix_caching": "assumed",
                "decodes_kept_moving": "assumed",
            },
        },
        "current": trial("current", 2048),
        "current_source": "assumed",
        "best": trial("search", 704, 128),
        "random_best": trial("random", 384, 0),
        "noise": 0.0123,
        "burst_attainment": 0.93,
        "binding": 0,
        "feasible": None,
        "curve": {
            "tokens": tokens,
            "idle_s": [round(0.0015 + max(0.008, 4e-5 * count + 1e-10 * count**2), 6) for count in tokens],
            "live_s": [round(0.0015 + max(0.0104, 4e-5 * count), 6) for count in tokens],
            "running_mean": 31.5,
            "context_mean_tokens": 40_000.0,
            "knee_live_tokens": 260.0,
        },
        "timeline": {
            "minute_start_s": 8.0,
            "minute_s": 60.0,
            "requests": 600,
            "bad_current": 540,
            "bad_best": 18,
            "start_s": 10.0,
            "length_s": 1.2,
            "exact": True,
            "current": bars(2048),
            "best": bars(704),
        },
        "search": {
            "sampler": "tpe",
            "knobs": ["chunk_cap_tokens", "step_tokens"],
            "window_trials": len(glances),
            "seed": 0,
            "trials": 12,
            "simulated_steps": 360_000,
            "random_trials": 6,
            "random_simulated_steps": 360_000,
        },
        "trials": [
            trial("current", 2048),
            trial("formula", 712),
            trial("knee", 200),
            *sweep,
            *tried,
            *random,
            *glances,
        ],
        "groups": [
            _group("all", "all requests", 1000, 0.1, 0.98),
            _group("prompt length", "up to 500 tokens", 400, 0.12, 0.99),
            _group("prompt length", "501 to 2,000 tokens", 600, 0.08, 0.97),
            _group("tenant", "gold | silver", 1000, 0.1, 0.98),
        ],
        "twin_error": {},
    }
    return values | changed


def _group(dimension: str, name: str, requests: int, before: float, after: float) -> dict[str, Any]:
    return {
        "dimension": dimension,
        "group": name,
        "requests": requests,
        "current": figures(before, trial("current", 2048)),
        "best": figures(after, trial("search", 704, 128)),
    }


def record(**changed: Any) -> RunRecord:
    """The same, loaded."""
    return record_from_json(json.dumps(record_values(**changed)), "the test's record")


def record_from_json(text: str, where: str) -> RunRecord:
    """Load a record; ``where`` names it in messages. Raises InputError: one line with key, value and bound."""
    try:
        return RunRecord.model_validate_json(text)
    except ValidationError as error:
        raise first_problem(error, where, "give a report.json that this release of rooftune wrote") from None

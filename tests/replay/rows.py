"""Rows of a replay to judge, match and write."""

from pathlib import Path

from pydantic import ValidationError

from rooftune.policies.wire import RequestColumns
from rooftune.tuner.files import read_text, shown_path
from rooftune.tuner.record import TargetPart, TrafficPart, first_problem
from rooftune.tuner.replay.result_file import (
    ClientPart,
    EnginePart,
    EngineRequestPart,
    ReplayResult,
    RequestPart,
    VerdictPart,
)


def row(
    index: int,
    sent_s: float = 1.0,
    ttft_s: float = 0.5,
    gaps_s: tuple[float, ...] = (0.1, 0.2),
    failure: str | None = None,
    prompt: int = 10,
    tenant: str = "default",
) -> RequestPart:
    """A request that ended well, or one with a failure and nothing else."""
    output = len(gaps_s) + 1
    good = failure is None
    return RequestPart(
        index=index,
        tenant=tenant,
        planned_s=sent_s,
        sent_s=sent_s,
        ttft_s=ttft_s if good else None,
        finish_s=sent_s + ttft_s + sum(gaps_s) if good else None,
        tpot_s=sum(gaps_s) / len(gaps_s) if good and gaps_s else None,
        prompt_tokens=prompt,
        asked_tokens=output,
        output_tokens=output if good else 0,
        cached_tokens=0,
        gaps_s=gaps_s if good else (),
        failure=failure,
        detail=None if good else "it said so",
    )


def columns(
    rows: list[tuple[int, float, int, int, float]], *, ended: str = "finished", lost: int = 0, now_s: float = 0.0
) -> RequestColumns:
    """Engine rows of (sequence, arrival_s, prompt, output, finish_s); gaps above 0.15 s: one of each request."""
    n = len(rows)
    return RequestColumns(
        boot_id="b",
        now_s=now_s,
        after=-1,
        next=rows[-1][0] if rows else -1,
        lost=lost,
        sequence=tuple(one[0] for one in rows),
        arrival_s=tuple(one[1] for one in rows),
        scheduled_s=tuple(one[1] for one in rows),
        ttft_s=(0.4,) * n,
        finish_s=tuple(one[4] for one in rows),
        prompt_tokens=tuple(one[2] for one in rows),
        cached_tokens=(0,) * n,
        output_tokens=tuple(one[3] for one in rows),
        gap_count=tuple(one[3] - 1 for one in rows),
        longest_gap_s=(0.19,) * n,
        preemptions=(0,) * n,
        ended=(ended,) * n,  # type: ignore[arg-type]  # checked by the schema
        gap_bounds_s=(0.15,),
        gap_over=((1,) * n,),
    )


def engine_part(rows: list[EngineRequestPart], missing: int = 0) -> EnginePart:
    return EnginePart(
        clock_offset_s=100.0, gap_bounds_s=(0.15,), lost=0, missing=missing, others=0, requests=tuple(rows)
    )


def engine_row(index: int, arrival_s: float, ttft_s: float = 0.4, longest_gap_s: float = 0.19) -> EngineRequestPart:
    return EngineRequestPart(
        index=index,
        sequence=index,
        arrival_s=arrival_s,
        scheduled_s=arrival_s + 0.1,
        ttft_s=ttft_s,
        finish_s=arrival_s + ttft_s + 0.3,
        output_tokens=3,
        cached_tokens=4,
        gap_count=2,
        longest_gap_s=longest_gap_s,
        gap_over=(1,),
        preemptions=0,
    )


def result(rows: list[RequestPart], verdicts: list[VerdictPart], engine: EnginePart | None = None) -> ReplayResult:
    return ReplayResult(
        schema="rooftune.replay",
        version=1,
        made_at="2026-01-01T00:00:00+00:00",
        made_by="rooftune test",
        url="http://x",
        model="m",
        vocab_tokens=1000,
        seed=1,
        interrupted=False,
        unsent=0,
        traffic=TrafficPart(
            name="t",
            changes=(),
            requests=len(rows),
            span_s=1.0,
            prompt_p50_tokens=1,
            prompt_p99_tokens=1,
            prompt_max_tokens=1,
            output_p50_tokens=1,
            output_p99_tokens=1,
            output_max_tokens=1,
            prompt_share_cached=None,
            tenants=1,
            source="given",
        ),
        objective="goodput",
        targets=(TargetPart(metric="ttft", quantile=0.99, bound_s=2.0, applies_to="all requests"),),
        client=ClientPart(
            late_p50_s=0.0, late_p99_s=0.0, late_max_s=0.0, shared_reads=0.0, short_answers=0, events_of_many=0,
            bottleneck=(),
        ),
        verdicts=tuple(verdicts),
        failures={},
        requests=tuple(rows),
        engine=engine,
        engine_error=None,
    )  # fmt: skip


def read_result(path: str | Path) -> ReplayResult:
    """Raises InputError: one line with file, key, value and bound."""
    text = read_text(path)
    try:
        return ReplayResult.model_validate_json(text)
    except ValidationError as error:
        raise first_problem(error, shown_path(path), "give a file that rooftune replay --out wrote") from None

"""What has not ended is in the replay of a window: assumed lengths, the columns of the job, and what it changes."""

import math
from functools import cache
from typing import Any

import numpy as np
import pytest

from rooftune.policies.request import SHORTEST_FIRST, Setting
from rooftune.policies.slo import Slo, Target, good
from rooftune.tuner.control.cycle.observe import Seen
from rooftune.tuner.control.cycle.propose import make_job
from rooftune.tuner.control.job import Job, WindowPart
from rooftune.tuner.control.searcher.window import (
    assumed_output,
    compared,
    observed_of,
    progress_of,
    traffic_of,
    with_unended,
)
from rooftune.tuner.observe.protocol import ProtocolReader
from rooftune.tuner.observe.rows import FlightRows, RequestRows
from rooftune.tuner.observe.window import Window
from tests.control.cycle_records import fit
from tests.control.doubles import options
from tests.control.live import SLOW, LiveEngine, LivePort, Traffic
from tests.control.test_eight_minutes import rows_of
from tests.observe.fake_port import FakePort


def test_an_answer_goes_on_as_the_finished_ones_that_became_longer_did() -> None:
    finished = np.array([4, 10, 20, 30])
    found = assumed_output(np.array([0, 4, 12, 25, 30, 99]), finished)
    assert found.tolist() == [16, 20, 25, 30, 31, 100]
    assert assumed_output(np.array([0, 7]), np.zeros(0, dtype=np.int64)).tolist() == [1, 8]


FINISHED = WindowPart(
    arrival_s=(-6.0, 1.0),
    scheduled_s=(-5.5, 3.0),
    ttft_s=(1.0, 3.0),
    finish_s=(5.0, 5.0),
    longest_gap_s=(0.1, 0.1),
    prompt_tokens=(100, 100),
    cached_tokens=(50, 50),
    output_tokens=(11, 5),
    gap_count=(10, 4),
    gap_bounds_s=(0.03,),
    gap_over=((3, 2),),
)


def flights(*rows: dict[str, Any]) -> FlightRows:
    """At 110 s on the engine's clock, 10 s after the window's start."""
    port = FakePort(now_s=110.0)
    for row in rows:
        port.flies(**row)
    page = port.in_flight()
    assert page is not None
    found = FlightRows.from_wire(page)
    assert found is not None
    return found


def test_unended_requests_join_the_window_by_arrival_and_are_not_compared() -> None:
    decode = {"scheduled_s": 96.0, "first_token_s": 97.0, "last_token_s": 109.0, "cached_tokens": 7}
    part = with_unended(
        FINISHED,
        flights(
            {"arrival_s": 95.0, "prompt_tokens": 40, "output_tokens": 9, "running": True} | decode,
            {"arrival_s": 100.5, "prompt_tokens": 60},
        ),
        100.0,
    )
    assert part.arrival_s == (-6.0, -5.0, 0.5, 1.0)
    assert part.produced_tokens == (11, 9, 0, 5) and part.output_tokens == (11, 11, 8, 5)
    assert part.cached_tokens == (50, 7, 30, 50), "of a waiting prompt the share of the others"
    assert part.finish_s == (5.0, 9.0, None, 5.0) and part.gap_over == ((3, 0, 0, 2),)
    seen, found = observed_of(part), progress_of(part)
    assert np.isnan(seen.finish_s).tolist() == [False, True, True, False]
    assert compared(seen, 0.0).tolist() == [True, False, False, True]
    assert found is not None and (found.at_s, found.running, len(found)) == (6.0, 2, 2)
    # Nine tokens between -3 s and 9 s: 1 + floor(8 / 4) at 0 s.
    assert found.produced_tokens.tolist() == [6, 3] and found.computed_tokens.tolist() == [105, 42]
    assert len(traffic_of(part)) == 4 and traffic_of(part, 0.0).prompt_tokens.tolist() == [60, 100]
    assert WindowPart.model_validate_json(part.model_dump_json()) == part


# --- more in flight than has ended --------------------------------------------------------------

SLO = Slo((Target("ttft", 2.0, 0.9), Target("longest_gap", 1.0, 0.9)))
BOUNDS = {"step_tokens": (64.0, 512.0), "order_policy": (0.0, 2.0), "aging_s": (1.0, 60.0)}
RATE_RPS, WINDOW_S = 8.0, 60.0


@cache
def overloaded() -> LiveEngine:
    """Shortest first and more documents than it can read: the chats are served, the documents wait."""
    boot = Setting(512, max_running=32, order_policy=SHORTEST_FIRST, aging_s=600.0)
    mix = Traffic(rate_rps=RATE_RPS, documents=3, output_tokens=40)
    engine = LiveEngine(traffic=mix, boot=boot, options={"max_queue": 2000})
    engine.advance(160.0)
    return engine


def job_of(tells: bool) -> tuple[Job, Seen]:
    reading = ProtocolReader(LivePort(overloaded(), tells=tells)).read(flights=True)
    seen = Seen(reading, Window(WINDOW_S).add(reading), (), SLO, -math.inf, WINDOW_S, 60.0)
    model = fit().model_copy(update={"coefficients": SLOW._asdict(), "intervals": {}})
    return make_job(seen, options(trials=20, seed=1), model, BOUNDS, (), 1), seen


@pytest.mark.slow
def test_an_overloaded_window_with_most_requests_in_flight_is_predicted_and_searched() -> None:
    from rooftune.tuner.control.searcher.run import run_job

    (without, _), (job, seen) = job_of(tells=False), job_of(tells=True)
    unended = seen.window.in_flight
    assert unended is not None and len(unended) > len(seen.demand), "more than have ended"
    inside = int((np.array(job.window.arrival_s) >= 0.0).sum())
    before, after = (run_job(one, lambda stage, done, total: None) for one in (without, job))
    engine, zero_s = overloaded(), seen.now_s
    engine.silence()
    engine.advance(2000.0)
    rows: RequestRows = rows_of(engine)
    inside_rows = (rows.arrival_s >= seen.arrivals_s[0]) & (rows.arrival_s <= zero_s)
    truth = float(good(rows.outcomes(), SLO)[inside_rows].mean())
    assert inside == int(inside_rows.sum()), "all that arrived are in the replay"
    print(f"share of good requests: truth {truth:.3f}")
    for name, found in (("without", before), ("with", after)):
        assert found.proposal is not None and found.load is not None and found.twin.verdict == "good"
        carries = found.load.in_force.sustainable_rps
        print(
            f"{name} the requests in flight: share {found.proposal.attainment_now:.3f}, "
            f"offered {found.load.offered_rps:.1f} req/s, carries {carries:.1f}, overload {found.load.overload}"
        )
    assert before.proposal is not None and before.load is not None and after.proposal is not None and after.load
    assert before.proposal.attainment_now - truth > 0.1 and not before.load.overload, "what was believed before"
    assert abs(after.proposal.attainment_now - truth) < 0.02
    assert after.load.overload and after.load.offered_rps == pytest.approx(RATE_RPS, rel=0.1)

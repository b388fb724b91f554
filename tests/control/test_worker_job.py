"""One job as the child runs it, in this process: the twin is judged first, and searched on only when it may be."""

import sqlite3
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from rooftune.policies.errors import InputError, RooftuneError, UnreachableError
from rooftune.policies.request import Setting
from rooftune.policies.slo import Slo, Target, good
from rooftune.tuner.control.job import Expected, Job, SearchAnswer, Span, WindowPart
from rooftune.tuner.control.memory import setting_of
from rooftune.tuner.control.searcher import run as runner
from rooftune.tuner.control.searcher.run import Tell, twin_part
from rooftune.tuner.control.searcher.window import block_of, compared, observed_of, progress_of, slo_of, traffic_of
from rooftune.tuner.search import archive
from rooftune.tuner.search.archive import Archive
from rooftune.tuner.search.lessons import LiveResult
from rooftune.tuner.search.live import MOST_LIVE, LiveProposal, Question, research
from rooftune.tuner.sim.noise import noise_from_steps
from rooftune.tuner.sim.twin import simulate
from tests.control.jobs import BASE, BOUNDS, GAP, MODEL, TTFT, InlineSearcher, job, mix, window

pytestmark = pytest.mark.slow


def run(asked: Job) -> SearchAnswer:
    searcher = InlineSearcher()
    assert searcher.ask(asked) and searcher.busy and not searcher.ask(asked)
    found = searcher.answer()
    assert isinstance(found, SearchAnswer) and searcher.answer() is None and not searcher.busy
    return found


def foretold(asked: Job) -> tuple[float | None, ...]:
    searcher = InlineSearcher()
    assert searcher.ask(asked)
    found = searcher.answer()
    assert isinstance(found, Expected)
    return found.shares


QUICK = Slo((Target("ttft", 0.5, 0.95), GAP))


def shares_of(window: WindowPart, spans: Sequence[Span]) -> list[float]:
    """The share of good requests that arrived in each span, as they happened."""
    arrival_s, met = np.array(window.arrival_s), good(observed_of(window), QUICK)
    return [float(met[(arrival_s >= from_s) & (arrival_s < until_s)].mean()) for _, from_s, until_s in spans]


def part_of(whole: WindowPart, rows: np.ndarray, zero_s: float = 0.0) -> WindowPart:
    """Some rows of a window, on a clock that starts at ``zero_s``."""
    chosen = np.flatnonzero(rows)
    values = {
        name: tuple(getattr(whole, name)[row] for row in chosen)
        for name in WindowPart.model_fields
        if name not in ("gap_bounds_s", "gap_over", "produced_tokens")
    }
    for name in ("arrival_s", "scheduled_s", "finish_s"):
        values[name] = tuple(value - zero_s for value in values[name])
    over = tuple(tuple(column[row] for row in chosen) for column in whole.gap_over)
    return WindowPart(**values, gap_bounds_s=whole.gap_bounds_s, gap_over=over)


def test_a_window_simulated_by_the_twin_is_predicted_exactly_and_searched() -> None:
    found = run(job())
    assert found.twin.verdict == "good" and found.twin.attainment_error == 0.0
    assert found.twin.worst_error is not None and found.twin.worst_error < 1e-9
    assert {"ttft p50", "ttft p95", "tpot p50", "longest gap p95", "gaps over 30 ms"} <= set(found.twin.errors)
    part = found.proposal
    assert part is not None
    assert part.verdict == "change" and part.gain == pytest.approx(part.attainment_proposed - part.attainment_now)
    assert part.random_trials > 0 and part.random_steps > 0 and part.trials == 30 and part.live_trials == 0
    assert part.random_attainment is not None and part.equal_attainment is not None
    setting = setting_of(part.setting)
    assert 128 <= setting.step_tokens <= 8192 and setting._replace(step_tokens=2048, chunk_cap_tokens=0) == BASE


def test_a_wrong_step_model_is_detected_and_nothing_is_proposed() -> None:
    slow = MODEL._replace(slope_s_per_token=MODEL.slope_s_per_token * 1.6, floor_s=MODEL.floor_s * 1.6)
    found = run(job(window=window(mix(), model=slow)))
    assert found.twin.verdict == "not_good" and found.proposal is None
    assert found.twin.worst_error is not None and found.twin.worst_error > 0.25
    assert found.twin.errors["tpot p50"] < -0.25  # the twin is too fast
    assert found.twin.attainment_error is not None and found.twin.attainment_error >= 0.0


def test_too_few_requests_are_searched_and_reported_as_too_few() -> None:
    found = run(job(mix(span_s=3.0)))
    assert found.twin.verdict == "too_few" and found.twin.missing_requests
    assert found.proposal is not None


def test_the_cut_end_of_a_window_does_not_count_against_the_twin() -> None:
    setting = Setting(512, max_running=128)
    whole = window(mix(3, rate_rps=9.0, span_s=180.0), setting)
    arrival_s, finish_s = np.array(whole.arrival_s), np.array(whole.finish_s)
    cut = part_of(whole, (finish_s > 60.0) & (arrival_s <= 120.0), zero_s=60.0)
    asked, progress, seen = job(window=cut), progress_of(cut), observed_of(cut)
    assert progress is not None and progress.at_s == -cut.arrival_s[0] > 0.0
    kept = compared(seen, progress.at_s)
    assert 0.5 * len(kept) <= kept.sum() < len(kept)
    assert not kept[0] and not kept[-1] and kept[len(kept) // 2]
    replay = simulate(traffic_of(cut), asked.engine, setting, MODEL, gap_bounds_s=[0.03], progress=progress)
    middle = twin_part([replay], seen, kept, slo_of(asked))
    assert middle.verdict == "good" and middle.attainment_error is not None and abs(middle.attainment_error) < 0.02


def test_the_twin_of_an_overloaded_window_starts_with_its_backlog() -> None:
    setting = Setting(512, max_running=64)
    whole = window(mix(4, rate_rps=18.0, span_s=180.0), setting)
    arrival_s, finish_s = np.array(whole.arrival_s), np.array(whole.finish_s)
    inside = (finish_s > 60.0) & (arrival_s <= 130.0)
    backlog, empty = (
        run(job(window=part_of(whole, rows, zero_s=60.0), base=setting, trials=2)).twin
        for rows in (inside, inside & (arrival_s >= 60.0))
    )
    assert backlog.verdict == "good" and abs(backlog.errors["ttft p50"]) < 0.02
    assert empty.verdict == "not_good" and empty.errors["ttft p50"] < -0.5


def test_what_runs_and_waits_when_a_window_begins_is_told_by_its_instants() -> None:
    """A decode, half of its 11 tokens written; a prompt, a quarter of it read; one that waits."""
    part = WindowPart(
        arrival_s=(-6.0, -3.0, -1.0, 1.0),
        scheduled_s=(-5.5, -1.0, 2.0, 3.0),
        ttft_s=(1.0, 6.0, 4.0, 3.0),
        finish_s=(5.0, 4.0, 4.0, 5.0),
        longest_gap_s=(0.1,) * 4,
        prompt_tokens=(100, 400, 50, 60),
        cached_tokens=(0, 0, 0, 0),
        output_tokens=(11, 5, 5, 5),
        gap_count=(10, 4, 4, 4),
    )
    found = progress_of(part)
    assert found is not None and (found.at_s, found.running) == (6.0, 2)
    assert found.request.tolist() == [0, 1, 2]
    assert found.produced_tokens.tolist() == [6, 0, 0] and found.computed_tokens.tolist() == [105, 100, 0]
    assert found.last_token_s[0] == 6.0 and np.isnan(found.last_token_s[1:]).all()
    assert progress_of(part.model_copy(update={"arrival_s": (0.0, 1.0, 2.0, 3.0)})) is None


BLOCKS: tuple[Span, ...] = tuple((at_s, at_s + 5.0, at_s + 30.0) for at_s in np.arange(30.0, 240.0, 30.0).tolist())


@pytest.mark.parametrize(("rate_rps", "backlog"), [(9.0, False), (12.0, True)])
def test_blocks_are_foretold_from_their_own_arrivals_and_the_backlog_at_their_start(
    rate_rps: float, backlog: bool
) -> None:
    setting, other = Setting(512, max_running=64), Setting(256, max_running=64)
    one, two = (window(mix(4, rate_rps=rate_rps, span_s=300.0), run_under) for run_under in (setting, other))
    asked = job(window=one, base=setting, after=setting, expect=BLOCKS, slo=QUICK)
    happened, elsewhere = shares_of(one, BLOCKS), shares_of(two, BLOCKS)
    assert max(happened) - min(happened) > 0.15
    now = foretold(asked)
    assert now == pytest.approx(happened, abs=0.02)
    then = foretold(asked.model_copy(update={"base": other, "after": other}))
    assert (then == pytest.approx(elsewhere, abs=0.03)) is not backlog  # theirs would have been another backlog
    both = foretold(asked.model_copy(update={"after": other}))
    assert both == pytest.approx(np.mean(np.array([now, then]), axis=0).tolist())


def test_a_block_is_foretold_with_the_engines_step_noise_the_same_way_each_time() -> None:
    rng = np.random.default_rng(5)
    modelled = rng.uniform(0.01, 0.1, 400)
    measured = modelled * np.where(rng.random(400) < 0.05, 3.0, 1.0)
    asked = job(mix(span_s=120.0), after=BASE, expect=BLOCKS[:2])
    noisy = asked.model_copy(
        update={"noise_modelled_s": tuple(modelled.tolist()), "noise_measured_s": tuple(measured.tolist())}
    )
    assert foretold(noisy) == foretold(noisy) != foretold(asked)


def test_a_block_without_requests_is_not_foretold_and_one_without_a_second_setting_is_refused() -> None:
    asked = job(after=BASE, expect=(BLOCKS[0], (500.0, 505.0, 530.0)))
    known, unknown = foretold(asked)
    assert known is not None and unknown is None
    with pytest.raises(InputError, match="under two settings"):
        foretold(asked.model_copy(update={"after": None}))


def test_a_block_of_a_window_begins_with_what_was_in_the_engine() -> None:
    whole = window(mix(4, rate_rps=6.0, span_s=120.0), Setting(512, max_running=64))
    arrival_s, finish_s = np.array(whole.arrival_s), np.array(whole.finish_s)
    block = block_of(whole, 60.0, 90.0)
    assert block == part_of(whole, (finish_s > 60.0) & (arrival_s < 90.0), zero_s=60.0)
    assert block.arrival_s[0] < 0.0 and max(block.arrival_s) < 30.0


def test_the_twin_includes_the_engines_step_noise() -> None:
    rng = np.random.default_rng(5)
    modelled = rng.uniform(0.01, 0.1, 400)
    measured = modelled * np.where(rng.random(400) < 0.05, 3.0, 1.0)
    asked = job(noise_modelled_s=tuple(modelled.tolist()), noise_measured_s=tuple(measured.tolist()), trials=4)
    noisy = simulate(
        mix(),
        asked.engine,
        BASE,
        MODEL,
        gap_bounds_s=[0.03],
        noise=noise_from_steps(modelled, measured, seed=99),
    ).outcomes
    seen = window(mix()).model_copy(
        update={
            "ttft_s": tuple((noisy.first_token_s - noisy.arrival_s).tolist()),
            "finish_s": tuple(noisy.finish_s.tolist()),
            "longest_gap_s": tuple(np.nan_to_num(noisy.longest_gap_s).tolist()),
            "gap_over": (tuple(noisy.gap_over[:, 0].tolist()),),
        }
    )
    with_noise = run(asked.model_copy(update={"window": seen})).twin
    without = run(job(window=seen, trials=4)).twin
    assert with_noise.verdict == "good" and without.verdict == "not_good"
    assert abs(with_noise.errors["longest gap p95"]) < 0.25 < abs(without.errors["longest gap p95"])


def test_targets_beyond_the_window_are_judged_by_what_it_shows() -> None:
    gap = Target("gap", 0.05, 0.99)
    assert [t.metric for t in slo_of(job(slo=Slo((TTFT, gap)))).targets] == ["ttft", "longest_gap"]
    assert [t.metric for t in slo_of(job()).targets] == ["ttft", "gap"]
    assert run(job(slo=Slo((), objective="tokens_per_s"), trials=4)).proposal is not None


def test_a_live_trial_that_failed_is_not_proposed_again() -> None:
    first = run(job())
    assert first.proposal is not None and first.proposal.attainment_proposed is not None
    bad = LiveResult(setting_of(first.proposal.setting), 0.2, 1500, first.proposal.attainment_proposed)
    again = run(job(live=(bad,)))
    assert again.proposal is not None and again.proposal.setting != first.proposal.setting
    assert again.proposal.live_trials == 1 and again.proposal.trials == 30


def test_where_many_ran_live_the_newest_are_heard_and_the_archive_keeps_the_oldest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Question] = []

    def noted(question: Question, tell: Tell) -> LiveProposal:
        asked.append(question)
        return research(question, tell)

    monkeypatch.setattr(runner, "research", noted)
    newest_first = tuple(LiveResult(BASE._replace(step_tokens=1000 - 8 * age), 0.5, 300, 0.5) for age in range(14))
    url = f"sqlite:///{tmp_path / 'studies.db'}"
    found = run(job(live=newest_first, trials=4, storage=url, study="shop"))
    assert asked[0].live == newest_first
    assert found.proposal is not None and found.proposal.live_trials == MOST_LIVE
    assert tuple(Archive(url, "shop").live()) == newest_first[::-1]


@pytest.mark.slow
def test_53_a_wider_grid_other_bounds_and_knobs_share_one_storage(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'studies.db'}"
    narrow = {"max_partial_prefills": (0.0, 1.0), "step_tokens": (256.0, 512.0)}
    wide = {**BOUNDS, "max_partial_prefills": (0.0, 8.0), "order_policy": (0.0, 2.0)}
    for bounds in (narrow, wide, {"chunk_cap_tokens": (64.0, 128.0)}):
        found = run(job(bounds=bounds, trials=6, storage=url, study="shop"))
        assert found.proposal is not None
    assert len(Archive(url, "shop").remembered(10)) >= 2


def test_47_a_locked_storage_is_refused_with_a_message_and_the_next_job_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "LOCK_WAIT_S", 0.05)
    path = tmp_path / "studies.db"
    asked = job(trials=4, storage=f"sqlite:///{path}", study="shop")
    run(asked)
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("begin exclusive")
    with pytest.raises(UnreachableError, match="locked"):
        run(asked)
    holder.execute("rollback")
    assert run(asked).proposal is not None


@pytest.mark.filterwarnings("ignore:Pydantic serializer")  # wrong on purpose
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": {"floor_s": 1.0}}, "model.overhead_s"),
        ({"model": {**MODEL._asdict(), "sharpness": 0.5}}, "sharpness"),
        ({"draws": ({"floor_s": 1.0},)}, "draws.0"),
        ({"base": {"step_tokens": 2048, "knob": 1}}, "knob"),
        ({"base": {"max_running": 8}}, "step_tokens"),
        ({"slo": {"targets": [{"metric": "beauty", "bound_s": 1.0, "quantile": 0.9}]}}, "metric"),
        ({"noise_modelled_s": (0.1,) * 30}, "twice"),
        ({"base": {"step_tokens": 1 << 20}}, "boot envelope"),
    ],
)
def test_an_invalid_job_raises_an_error_with_a_remedy(changes: dict[str, object], words: str) -> None:
    with pytest.raises(RooftuneError, match=words) as caught:
        run(job().model_copy(update=changes))
    assert ";" in str(caught.value)


def test_an_empty_window_is_refused() -> None:
    empty = part_of(window(mix()), np.zeros(len(window(mix()).arrival_s), dtype=bool))
    with pytest.raises(InputError, match="no finished request"):
        run(job(window=empty))

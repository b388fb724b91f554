"""``explain``: five plain lines from the record alone, for every code that there is."""

import pytest

from rooftune.policies.guard import Action, Reason
from rooftune.policies.request import Setting
from rooftune.tuner.control.explain.explain import (
    BEFORE_GUARD,
    MEANING,
    NEXT,
    explain,
    knobs,
    seconds,
    share,
)
from rooftune.tuner.control.outcome import CycleRecord, FigurePart, SignalPart, TwinPart
from tests.control.cycle_records import figures, fit, hold, proposal, push, twin, verify

CODES = list(Reason)

PUSHED = """\
Seen: 420 requests in 60 s, 90 % within the targets, TTFT p95 1.25 s, longest gap p99 310 ms; \
signals: queue_growing.
Believed: the knee is at 200 tokens (180 to 230) by 4096 steps; the twin predicts this window well, worst error 6 %.
Proposed: token budget 512 tokens, chunk cap 256 tokens (90 % within the targets now, 97 % then), \
the best of 100 settings; the limit is gap p99 <= 30 ms.
Guard: pushed token budget 1024 tokens, chunk cap 256 tokens: the proposal is further away than one push may go; \
this push goes part of the way.
Next: it goes on by such steps, then both settings take turns; in force is token budget 2048 tokens, chunk cap none \
with 98 s of the lease left."""

REVERTED = """\
Seen: 420 requests in 60 s, 84 % within the targets, TTFT p95 1.25 s, longest gap p99 310 ms, 3 failed, \
12 preemptions; 40 step and 2 request records were lost.
Believed: no step model in this cycle; the twin was not asked.
Proposed: nothing.
Guard: took the push back: the latest push did measurably worse than what was in force before it; \
the push of cycle 40 was worse: gain -6.4 +/- 2.1 points, predicted +7.0, crossed gap_p99_s.
Next: the setting before is back, and the next search takes this loss into account; \
in force is token budget 2048 tokens, chunk cap none."""

BLIND = """\
Seen: no requests of this window.
Believed: no step model in this cycle; the twin was not asked.
Proposed: nothing.
Guard: held before the guard had anything to decide: the engine did not answer (no connection, Connection refused).
Next: it tries again in the next cycle; if it stays silent the lease ends and the engine returns to its boot setting."""


def _text(record: CycleRecord) -> str:
    return "\n".join(explain(record))


def test_a_push() -> None:
    assert _text(push(41)) == PUSHED


def test_a_reverted_push() -> None:
    seen = figures(attainment=0.84, failed=3, preemptions=12)
    worse = verify(40, verdict="worse", reason="loss_shown", observed_gain=-0.064, crossed=("gap_p99_s",))
    record = hold(
        47, Reason.VERDICT_WORSE, action=Action.REVERT, observed=seen, verify=worse, lost_steps=40, lost_requests=2,
        lease_left_s=None,
    )  # fmt: skip
    assert _text(record) == REVERTED


def test_an_operators_revert_is_not_called_a_push_taken_back() -> None:
    record = hold(48, Reason.BLOCKED_AFTER_REVERT, action=Action.REVERT, detail="requested by bob")
    assert "Guard: set the engine back to its boot setting: an operator reverted" in _text(record)


def test_the_twins_figures_are_named_foretold_and_observed() -> None:
    parts = {
        "good share": FigurePart(unit="share", foretold=0.68, observed=0.65, half_width=0.03, verdict="good"),
        "ttft p99": FigurePart(unit="s", foretold=2.0, observed=3.1, half_width=0.4, verdict="too_few"),
    }
    few = hold(5, Reason.TWIN_TOO_FEW, twin=twin(verdict="too_few", figures=parts, missing_requests=60))
    assert (
        "too few requests to judge the twin by, about 60 more are needed (good share 68 % foretold, 65 % observed; "
        "ttft p99 2 s foretold, 3.1 s observed, too few)" in explain(few)[1]
    )
    old = TwinPart.model_validate({"verdict": "good", "worst_error": 0.1, "attainment_error": 0.0, "errors": {}})
    assert old.figures == {} and old.missing_requests is None


def test_an_unreachable_engine() -> None:
    record = hold(
        48, Reason.UNREACHABLE, observed=None, in_force=None, lease_left_s=None,
        detail="no connection,\nConnection refused",
    )  # fmt: skip
    assert _text(record) == BLIND


def test_every_code_has_a_text_and_every_text_a_code() -> None:
    assert set(MEANING) == set(NEXT) == set(CODES)
    for words in (MEANING, NEXT):
        assert all(
            text and text == text.strip() and not text.endswith(".") and "\n" not in text for text in words.values()
        )
    assert BEFORE_GUARD < set(Reason)
    assert not BEFORE_GUARD & {Reason.OK, Reason.VERIFYING, Reason.CONFLICT, Reason.FOUND_FOREIGN, Reason.HELD_BY_OTHER}
    assert len(set(MEANING.values())) == len(MEANING)  # no two codes have the same text
    assert len({code.value for code in CODES}) == len(CODES)  # a record's reason is one code, never two


@pytest.mark.parametrize("reason", CODES)
@pytest.mark.parametrize("action", list(Action))
def test_five_lines_whatever_happened(reason: Reason, action: Action) -> None:
    for record in (
        hold(3, reason, action=action),
        push(3, reason=reason, action=action),
        hold(3, reason, action=action, observed=None, in_force=None, fit=fit(knee_tokens=None, codes=("slope",))),
        hold(
            3, reason, action=action, twin=twin(verdict="too_few", worst_error=None), proposal=proposal(verdict="keep")
        ),
        hold(3, reason, action=action, proposal=proposal(verdict="infeasible", gain=None, attainment_now=None)),
        hold(3, reason, action=action, would_push={"order_policy": 2, "aging_s": 10.0}, mode="shadow"),
        hold(3, reason, action=action, verify=verify(1, observed_gain=None, half_width=None)),
    ):
        lines = explain(record)
        assert len(lines) == 5
        starts = ("Seen: ", "Believed: ", "Proposed: ", "Guard: ", "Next: ")
        assert all(line.startswith(start) and line.endswith(".") for line, start in zip(lines, starts, strict=True))
        assert not any("\n" in line or "None" in line or "nan" in line for line in lines)
        assert MEANING[reason] in lines[3] and NEXT[reason] in lines[4]


def test_shadow_mode_reports_what_live_mode_would_push() -> None:
    lines = explain(hold(3, Reason.SHADOW, would_push={"step_tokens": 512}, mode="shadow"))
    assert "live mode would push token budget 512 tokens" in lines[3]


def test_what_a_signal_or_a_missing_figure_adds_or_leaves_out() -> None:
    plain = explain(hold(3))
    with_signals = explain(
        hold(3, signals=(SignalPart(code="kv_bound", evidence={}), SignalPart(code="hung", evidence={})))
    )
    assert with_signals[0] == plain[0].removesuffix(".") + "; signals: kv_bound, hung."
    assert "TTFT" not in explain(hold(3, observed=figures(ttft_p95_s=None)))[0]
    assert "TTFT" not in explain(hold(3, observed=figures(ttft_p95_s="inf")))[0]


def test_a_step_on_the_way_that_is_worse_than_both_ends_is_named() -> None:
    half, quarter = {"step_tokens": 1024}, {"step_tokens": 600}
    said = explain(push(3, proposal=proposal(path=((half, 0.299), (quarter, 0.95)))))[2]
    assert said.endswith("; on the way a step would show 29.9 %.")
    assert "on the way" not in explain(push(3, proposal=proposal(path=((quarter, 0.95),))))[2]


def test_knobs_in_words() -> None:
    assert knobs({"chunk_cap_tokens": 0, "step_tokens": 512}) == "token budget 512 tokens, chunk cap none"
    assert knobs({"order_policy": 2, "aging_s": 5.0}) == "order policy deadline, aging_s 5"
    assert knobs({}) == "no knob"
    whole = Setting(step_tokens=512)._replace(max_running=64)._asdict()
    assert knobs(whole) == "token budget 512 tokens, chunk cap none, sequence cap 64"


def test_numbers_for_people() -> None:
    times = (0.0123, 0.9999, 1.254, 90.0, 300.0, 7200.0, 1e6)
    assert [seconds(value) for value in times] == ["12.3 ms", "1 s", "1.25 s", "90 s", "5 min", "2 h", "12 d"]
    assert [share(value) for value in (0.0, 0.973, 0.9994, 1.0)] == ["0 %", "97.3 %", "99.94 %", "100 %"]


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (None, 124.0, "no knee that the steps would hold (below 124 tokens if there is one) (floor_unknown)"),
        (60.0, None, "no knee that the steps would hold (above 60 tokens if there is one) (floor_unknown)"),
        (None, None, "a step model with no knee that the steps would hold (floor_unknown)"),
    ],
)
def test_an_unidentified_knee_is_shown_with_its_known_bound(low: float | None, high: float | None, said: str) -> None:
    open_fit = fit(knee_tokens=None, knee_low_tokens=low, knee_high_tokens=high, codes=("floor_unknown",))
    assert said in explain(hold(5, Reason.WITHIN_NOISE, fit=open_fit))[1]

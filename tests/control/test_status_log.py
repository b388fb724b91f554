"""Log lines: one an outcome, whole on one line whatever stands in it, level by kind."""

import io
import json
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooftune.policies.guard import Action, Reason
from rooftune.tuner.control.status.log import EventLog, Level, level_of, outcome_fields, render
from tests.control.cycle_records import hold, push, verify


def test_levels_follow_the_kind() -> None:
    assert level_of(push(1)) is Level.INFO and level_of(hold(1)) is Level.INFO
    assert level_of(hold(1, Reason.VERDICT_WORSE, action=Action.REVERT)) is Level.WARNING
    assert level_of(hold(1, Reason.UNREACHABLE)) is Level.WARNING
    assert level_of(hold(1, Reason.UNAUTHORIZED)) is Level.ERROR
    for reason in Reason:
        assert level_of(hold(1, reason, action=Action.REVERT)) >= Level.WARNING


def test_a_logfmt_line_golden() -> None:
    line = render(0.25, Level.INFO, outcome_fields(push(41, verify=verify(30)), "rooftune/abcd"), "logfmt")
    assert line == (
        "at=1970-01-01T00:00:00.250Z level=info event=push cycle=41 action=push reason=step_limited mode=live "
        'engine=chat-eu-1 took_s=0.07 actor=rooftune/abcd pushed="step_tokens=1024 chunk_cap_tokens=256" '
        "attainment=0.9 goodput_rps=6.3 knee_tokens=200 verdict=better verified_cycle=30 lease_left_s=98 "
        "signals=queue_growing"
    )


@pytest.mark.parametrize("at_s", [1e15, -1e15, float("inf")])
def test_an_invalid_wall_clock_loses_no_line(at_s: float) -> None:
    stream = io.StringIO()
    EventLog(stream).write(at_s, Level.INFO, outcome_fields(hold(3), "a"))
    assert "cycle=3" in stream.getvalue()


def test_a_json_line_holds_the_same_fields() -> None:
    fields = outcome_fields(hold(3, Reason.GARBAGE, detail='a "quote"\nand more'), "a")
    found = json.loads(render(0.0, Level.WARNING, fields, "json"))
    assert found["detail"] == 'a "quote"\nand more' and found["reason"] == "garbage" and found["level"] == "warning"


@given(st.text(max_size=40))
def test_a_log_line_stays_one_parseable_line(text: str) -> None:
    for form in ("logfmt", "json"):
        line = render(0.0, Level.INFO, {"a": text, "b": 1}, "logfmt" if form == "logfmt" else "json")
        assert "\n" not in line and line.isprintable()
        if form == "json":
            assert json.loads(line)["a"] == text
        else:
            assert line.rsplit(" ", 1)[1] == "b=1"
    if text.isascii() and text.isalnum():
        assert shlex.split(render(0.0, Level.INFO, {"a": text}, "logfmt"))[2] == f"a={text}"


def test_lines_below_the_level_are_dropped_and_a_failing_stream_is_harmless() -> None:
    stream = io.StringIO()
    log = EventLog(stream, "warning")
    log.write(0.0, Level.INFO, {"a": 1})
    log.write(0.0, Level.ERROR, {"a": 2})
    assert stream.getvalue().count("\n") == 1
    stream.close()
    log.write(0.0, Level.ERROR, {"a": 3})

    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    EventLog(Full(), "debug").write(0.0, Level.DEBUG, {"a": 4})


def test_unknown_levels_are_not_accepted() -> None:
    with pytest.raises(KeyError):
        EventLog(io.StringIO(), "loud")

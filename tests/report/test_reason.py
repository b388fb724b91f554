"""Why a change helps and what it costs, how far to trust it, and what its flags mean: all from the figures."""

import re
from typing import Any

import pytest

from rooftune.tuner.report import headline
from rooftune.tuner.report.findings import cause, trade
from rooftune.tuner.report.flags import flag_words
from rooftune.tuner.report.render import html_page, markdown_page, summary
from rooftune.tuner.report.trust import verdict, watch
from tests.report.records import record, record_values, trial

KEEP = {"verdict": "keep", "best": trial("current", 2048)}


def test_a_smaller_budget_says_what_waits_now_and_what_is_delayed() -> None:
    said = cause(record())
    for needed in ("up to 2,048 tokens", "at most 704 tokens", "at most 128", "end sooner", "first tokens come later"):
        assert needed in said, needed


def test_effects_are_only_claimed_where_the_replays_show_them() -> None:
    before = trial("current", 2048)
    same = {name: before[name] for name in ("gap_p99_s", "longest_gap_p99_s", "ttft_p99_s")}
    said = cause(record(best=trial("search", 704, **same)))
    assert "steps of at most 704 tokens prompts need more steps" in said
    assert "sooner" not in said and "later" not in said
    # One measure better and the other worse is not an even flow.
    assert "sooner" not in cause(record(best=trial("search", 704, longest_gap_p99_s=9.0)))


def test_a_larger_budget_names_the_longer_steps() -> None:
    said = cause(record(best=trial("search", 4096)))
    assert "at most 2,048 tokens" in said and "up to 4,096 tokens" in said
    assert "first tokens come sooner" in said and "waits for the longer steps" in said


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (0, 128, "one prompt may fill a step. With at most 128 tokens"),
        (256, 128, "at most 256 tokens of one prompt are read in a step. With at most 128 tokens"),
        (128, 256, "With up to 256 tokens of it a long prompt needs fewer steps"),
        (128, 0, "With as much of it as fits a long prompt needs fewer steps"),
        (128, 128, ""),
    ],
)
def test_a_chunk_cap_alone(old: int, new: int, said: str) -> None:
    text = cause(record(current=trial("current", 704, old), best=trial("search", 704, new)))
    assert said in text and bool(said) == bool(text)


def test_without_running_requests_no_stall_is_claimed() -> None:
    assert cause(record(traffic=record_values()["traffic"] | {"output_max_tokens": 1})) == ""


def test_the_trade_sorts_figures_by_direction() -> None:
    better, worse = trade(record()).split(" Worse: ")
    assert better == "Better: gap between tokens p99 83.4 ms → 22 ms (target 30 ms)."
    assert worse == "time to first token p99 625 ms → 1.87 s (target 2 s)."
    slower = trade(record(best=trial("search", 704, 128, tokens_per_s=1900.0)))
    assert "output 2,000 tokens/s → 1,900 tokens/s" in slower.split(" Worse: ")[1]
    backwards = trade(record(current=trial("current", 704, 128), best=trial("search", 2048)))
    assert "gap between tokens p99 22 ms → 83.4 ms" in backwards.split(" Worse: ")[1]


def test_the_trade_covers_never_and_metrics_without_a_target() -> None:
    bare: dict[str, Any] = {"targets": [], "binding": None, "random_best": trial("random", 384, margins=[])}
    said = trade(
        record(
            **bare,
            trials=[],
            current=trial("current", 2048, margins=[], ttft_p99_s="inf"),
            best=trial("search", 704, margins=[], gap_p99_s=None),
        )
    )
    assert said == "Better: time to first token p99 never → 1.82 s. Worse: nothing of the whole run by 1 % or more."


def test_the_group_that_pays_is_named() -> None:
    groups = record_values()["groups"]
    assert "Who pays" not in trade(record())
    loses = [*groups[:2], groups[2] | {"best": groups[2]["best"] | {"attainment": 0.05}}, *groups[3:]]
    assert "Who pays: prompt length 501 to 2,000 tokens, 8.0 % → 5.0 % good of 600 requests." in trade(
        record(groups=loses)
    )
    few = [groups[0], groups[1] | {"requests": 5, "best": groups[1]["best"] | {"attainment": 0.0}}]
    assert "Who pays" not in trade(record(groups=few))


def _model(source: str) -> dict[str, Any]:
    return record_values()["step_model"] | {"source": source}


def test_the_verdict_states_what_was_measured_and_checked() -> None:
    assumed = verdict(record())
    assert "not compared with your engine, with assumed step times (8b-2tbs: constants" in assumed
    assert "try it on one server first" in assumed
    measured = verdict(record(step_model=_model("measured")))
    assert "not compared with your engine, with measured step times. Try it on one server first" in measured
    checked = verdict(record(step_model=_model("measured"), twin_error={"ttft_p99": 0.02, "gap_p99": -0.04}))
    assert "a checked twin (off by at most 4.0 % where checked)" in checked and "not compared" not in checked
    assert "server" not in verdict(record(**KEEP))


def test_the_report_says_to_watch_the_targets() -> None:
    said = watch(record())
    assert "time to first token p99 within 2 s (simulated 1.87 s)" in said
    assert "gap between tokens p99 within 30 ms (simulated 22 ms)" in said
    # What is predicted must not be a reason to undo it.
    assert said.endswith("Undo it if one is clearly worse than both its target and its simulated value.")
    assert watch(record(**KEEP)) == trade(record(**KEEP)) == cause(record(**KEEP)) == ""


def test_flags_name_the_budget_in_force_and_the_ceiling() -> None:
    said = " ".join(flag_words(record()))
    assert "The token budget in force is --max-num-scheduled-tokens 704." in said
    assert "--max-num-batched-tokens 8192 is only the ceiling" in said and "0.12 does not" in said
    engine = record_values()["engine"] | {"ceiling_tokens": 704}
    assert "only the ceiling" not in " ".join(flag_words(record(engine=engine)))


def test_saving_the_command_line_is_advised_only_if_it_was_assumed() -> None:
    asked = "Save your present command line first"
    given = record(current_source="given")
    for render in (html_page, markdown_page, summary):
        assert asked in render(record())
        assert asked not in render(given)
    assert headline.undo(record(**KEEP)) == ()


@pytest.mark.parametrize("render", [html_page, markdown_page, summary])
def test_every_rendering_has_reason_trade_trust_and_flags(render: Any) -> None:
    text = " ".join(re.sub("</?code>|`", "", render(record())).replace("\xa0", " ").split())
    made = record()
    for sentence in (headline.why(made), trade(made), verdict(made), watch(made), flag_words(made)[0]):
        assert sentence in text, sentence

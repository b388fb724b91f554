"""What the page must hold, and must not."""

import re
from html.parser import HTMLParser
from typing import Any

import pytest

from rooftune.tuner.report import tables, trust, words
from rooftune.tuner.report.flags import flag_notes, vllm_flags_before
from rooftune.tuner.report.render import html_page, markdown_page, summary
from tests.report.records import record, trial

VOID = {"meta", "link", "br", "line", "rect", "circle", "path", "polyline"}


class _Check(HTMLParser):
    """Every element closed in order, every id once, every label pointing at one; the visible text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.labels: list[str] = []
        self.text: list[str] = []
        self.urls: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        given = dict(attrs)
        if "id" in given:
            self.ids.append(given["id"] or "")
        self.labels += (given.get("aria-labelledby") or "").split()
        self.urls += [value or "" for name, value in attrs if name in ("href", "src")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.text.append(data)


def _checked(page: str) -> _Check:
    check = _Check()
    check.feed(page)
    check.close()
    assert check.open == []
    assert len(set(check.ids)) == len(check.ids)
    assert set(check.labels) <= set(check.ids)
    return check


VERDICTS: list[dict[str, Any]] = [
    {},
    {"verdict": "infeasible", "best": trial("search", 512, 16, feasible=False)},
    {"verdict": "keep", "best": trial("current", 2048)},
    {"objective": "tokens_per_s", "targets": [], "binding": None, "noise": None},
    {"twin_error": {"ttft_p99": 0.04}},
]


def _without_margins(changed: dict[str, Any]) -> dict[str, Any]:
    if changed.get("targets") != []:
        return changed
    bare = {name: trial("search", 2048, margins=[]) for name in ("current", "best", "random_best")}
    return changed | bare | {"trials": [trial("sweep", budget, margins=[]) for budget in (512, 1024)]}


@pytest.mark.parametrize("changed", VERDICTS)
def test_page_is_well_formed_and_makes_no_requests(changed: dict[str, Any]) -> None:
    made = record(**_without_margins(changed))
    page = html_page(made)
    check = _checked(page)
    assert set(check.urls) == {"data:,", "#words"}
    assert "words" in check.ids
    assert "<script" not in page
    assert not re.search(r"https?://", page)
    assert markdown_page(made).endswith("\n")
    assert "nan" not in page.lower().replace("tenant", "")


def test_text_of_the_record_is_escaped() -> None:
    made = record(traffic=record().traffic.model_dump() | {"name": "<img src=x onerror=alert(1)>|`"})
    assert "<img" not in html_page(made)
    assert "<img" not in markdown_page(made)
    assert "\\|\\`" in markdown_page(made)


def test_first_screen_says_what_why_how_and_undo() -> None:
    text = " ".join("".join(_checked(html_page(record())).text).replace("\xa0", " ").split())
    first = text[: text.index("Before and after")]
    for needed in (
        "Set token budget to 704 tokens and chunk cap to 128 tokens",
        "98.0 % of requests meet every target, against 10.0 %",
        "± 1.23 percentage points",
        "+88.0 ± 1.23",
        "good requests, defaults (assumed)10.0 %",
        "without --max-num-scheduled-tokens and --long-prefill-token-threshold",
        "--max-num-scheduled-tokens 704",
        "--long-prefill-token-threshold 128",
        "--max-num-batched-tokens 2048",
        "time to first token p99 within 2 s",
        "gap between tokens p99 within 30 ms",
        "has not been checked against your engine",
        "8b-2tbs is assumed, not measured",
        "All latencies are simulated",
    ):
        assert needed in first, needed


def test_a_checked_twin_does_not_claim_to_be_unchecked() -> None:
    assert not any("not been checked" in line for line in trust.caveats(record(twin_error={"ttft_p99": 0.04})))


def test_summary_has_one_figure_for_before_and_one_for_after() -> None:
    message = summary(record())
    assert "98.0 %" in message
    assert "10.0 %" in message
    assert "1 request/s -> 9.8 requests/s" in message
    assert all(len(line) <= 110 or "--max-num" in line for line in message.splitlines())


def test_flags_before_are_what_stock_vllm_is_started_with() -> None:
    made = record()
    assert " ".join(vllm_flags_before(made)) == "--max-num-batched-tokens 2048 --max-num-seqs 256"
    assert flag_notes(made.best) == ()


def test_policies_are_not_passed_off_as_flags() -> None:
    setting = {"step_tokens": 704, "order_policy": 1, "budget_policy": 2, "max_partial_prefills": 2}
    made = record(best=trial("search", 704, setting=setting))
    notes = flag_notes(made.best)
    assert len(notes) == 2
    assert "the budget policy and the order policy" in notes[1] and "--max-num-partial-prefills 2" in notes[0]


def test_random_search_that_never_ends_is_drawn_and_named_so() -> None:
    made = record(random_best=trial("random", 384, ttft_p99_s="inf"))
    row = next(row for row in tables.baselines(made).rows if row[0].startswith("random"))
    assert words.NEVER in row


@pytest.mark.parametrize("build", [tables.outcome, tables.baselines, tables.groups, tables.search, tables.inputs])
def test_tables_are_rectangular(build: Any) -> None:
    table = build(record())
    assert table.rows
    assert {len(row) for row in table.rows} == {len(table.header)}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0.0295, "29.5 ms"),
        (2.0, "2 s"),
        (0.00004, "40 µs"),
        (0.9999, "1 s"),
        (0.9994, "999 ms"),
        (1234.5, "1,234 s"),
        ("inf", "never"),
        (None, "no samples"),
        (0.0, "0 µs"),
    ],
)
def test_seconds(value: Any, message: str) -> None:
    assert words.seconds(value) == message


def test_a_setting_that_misses_a_target_is_not_called_recommended() -> None:
    made = record(verdict="infeasible", best=trial("search", 512, 16, feasible=False))
    for text in (html_page(made), markdown_page(made), summary(made)):
        assert "No setting meets every target" in text
        assert "recommended" not in text


def test_nothing_to_set_means_nothing_to_do_and_nothing_to_undo() -> None:
    made = record(verdict="infeasible", best=trial("current", 2048))
    assert "--max-num" not in summary(made)
    assert "--max-num" not in markdown_page(made)
    assert "Leave the engine as it is" in html_page(made)


def test_a_run_without_any_token_still_renders() -> None:
    lost: dict[str, Any] = {
        name: "inf" for name in trial("search", 512) if name.endswith("_s") and "tokens" not in name
    }
    lost |= {
        "margins": [{"measured_s": "inf", "margin": "inf", "samples": 5}] * 2,
        "attainment": 0.0,
        "feasible": False,
    }
    empty = lost | {"gap_p99_s": None, "gap_p50_s": None, "goodput_rps": None, "attainment": None, "tpot_p95_s": None}
    trials = [trial("sweep", budget, **lost) for budget in (512, 1024)] + [trial("search", 512, 64, **empty)] * 3
    names = {name: trial(name, 2048, **empty) for name in ("current", "best", "random_best")}
    made = record(verdict="infeasible", noise=None, trials=trials, **names)
    _checked(html_page(made))
    assert "no samples" in summary(made)
    assert words.NEVER in markdown_page(made)


def test_a_target_without_samples_is_reported_as_not_judged() -> None:
    rows = [{"measured_s": 1.0, "margin": -0.5, "samples": 10}, {"measured_s": None, "margin": None, "samples": 0}]
    made = record(best=trial("search", 704, margins=rows))
    assert any("No sample for gap between tokens p99" in line for line in trust.caveats(made))

"""The findings a report states before its figures: little to gain, new knobs, infeasible targets."""

import html
import re
from typing import Any

import pytest

from rooftune.tuner.report import headline, tables
from rooftune.tuner.report.charts import budget_and_cap, step_curve, timelines, ttft_against_gap
from rooftune.tuner.report.findings import extras, little_to_gain, target_floor_s
from rooftune.tuner.report.flags import HOOK, elsewhere, vllm_versions
from rooftune.tuner.report.render import html_page, markdown_page, summary
from tests.report.records import TTFT_BOUND_S, record, record_values, trial

POLICIES = {
    "step_tokens": 704,
    "chunk_cap_tokens": 128,
    "max_running": 256,
    "max_partial_prefills": 2,
    "budget_policy": 2,
    "pressure_tokens": 256,
    "pressure_prefills": 2,
    "order_policy": 1,
    "aging_s": 5.0,
}


def _with_policies() -> Any:
    return record(best=trial("search", 704, 128, setting=POLICIES))


def _quiet(**changed: Any) -> Any:
    """One request at a time, short prompts, and a best setting that wins nothing."""
    values = record_values()
    traffic = values["traffic"] | {"prompt_max_tokens": 1500}
    curve = values["curve"] | {"running_mean": 0.7}
    return record(**{"traffic": traffic, "curve": curve, "verdict": "keep", "best": trial("current", 2048)} | changed)


def test_policies_are_named_in_plain_words_on_every_first_screen() -> None:
    made = _with_policies()
    said = extras(made)
    assert len(said) == 3
    assert sum("A vLLM without Rooftune's hook does not have this" in sentence for sentence in said) == 2
    assert sum("A vLLM from 0.27 on does not have this" in sentence for sentence in said) == 1
    for text in (html_page(made), markdown_page(made), summary(made)):
        text = " ".join(text.replace("\xa0", " ").split())
        assert "the prompt with the fewest tokens left is read first" in text
        assert "a request that has waited 5 s goes first" in text
        assert "at most 256 tokens" in text
        assert "at most 2 prompts are half-read" in text


@pytest.mark.parametrize(
    ("share", "said"),
    [(None, "has waited 5 s goes first whatever"), (1.0, "5 s goes first whatever"), (0.1, "in 10 % of the steps")],
)
def test_the_share_of_the_aged_is_said_where_it_is_not_all(share: float | None, said: str) -> None:
    policies = POLICIES | ({} if share is None else {"aged_share": share})
    sentence = extras(record(best=trial("search", 704, 128, setting=policies)))[0].replace("\xa0", " ")
    assert said in sentence
    assert ("behind all others in the rest" in sentence) == (share == 0.1)


def test_every_rendering_undoes_without_the_hooks_policies_and_has_no_stray_comma() -> None:
    for render in (html_page, markdown_page, summary):
        assert "without the hook's policies" in _plain(render(_with_policies()))
        assert "without the hook's policies" not in _plain(render(record()))
        assert " ," not in _plain(render(_with_policies()))


def _plain(text: str) -> str:
    """What a reader sees of a rendering, on one line."""
    shown = re.sub(r"<style.*?</style>|<svg.*?</svg>|<[^>]+>", "", text, flags=re.DOTALL)
    return " ".join(html.unescape(shown).split())


def test_the_title_names_two_knobs_and_counts_the_rest() -> None:
    assert headline.title(_with_policies()) == (
        "Set token budget to 704 tokens, chunk cap to 128 tokens and 3 more knobs"
    )
    assert headline.title(record()) == "Set token budget to 704 tokens and chunk cap to 128 tokens"
    none = record(verdict="infeasible", best=trial("search", 512, feasible=False))
    assert headline.title(none).endswith("best found: token budget 512 tokens")


def test_a_stock_setting_has_nothing_new() -> None:
    assert extras(record()) == ()
    assert "hook's policies" not in summary(record())


def test_flags_of_every_version_say_live_restart_or_absent() -> None:
    rows = {row[0]: row[1:] for row in vllm_versions(_with_policies().best)}
    assert rows["token budget"][0].startswith("--max-num-batched-tokens 704 ")
    assert all(cell.startswith("--max-num-scheduled-tokens 704 ") for cell in rows["token budget"][1:])
    assert rows["partial-prefill cap"][1].startswith("--max-num-partial-prefills 2 ")
    assert rows["partial-prefill cap"][2:] == (HOOK, HOOK)
    assert set(rows["order policy"]) == {HOOK}
    assert all("restart" in cell or "no flag" in cell for cells in rows.values() for cell in cells)
    others = elsewhere(_with_policies(), _with_policies().best)
    assert {row[0] for row in others} == {"SGLang", "TensorRT-LLM", "TGI", "all three"}
    assert others[-1][1] == "chunk cap, partial-prefill cap, budget policy, order policy" and others[-1][3] == "absent"


def test_tensorrt_takes_whole_kv_blocks() -> None:
    engine = record().engine.model_dump() | {"block_tokens": 64}
    made = record(engine=engine, best=trial("search", 700))
    assert next(row for row in elsewhere(made, made.best) if row[0] == "TensorRT-LLM")[2].startswith(
        "max_num_tokens: 640 "
    )


def test_little_to_gain_comes_first() -> None:
    made = _quiet()
    assert little_to_gain(made)
    assert headline.title(made).startswith("Little to gain")
    lines = summary(made).splitlines()
    assert lines[0].startswith("Little to gain") and lines[2].startswith("  first")
    page = html_page(made)
    assert page.index("Tuning has little to work with") < page.index("<dt>What</dt>")


@pytest.mark.parametrize(
    "changed",
    [
        {"curve": record_values()["curve"]},
        {"traffic": record_values()["traffic"]},
        {"verdict": "change", "best": trial("search", 704)},
    ],
)
def test_much_to_gain_is_not_called_little(changed: dict[str, Any]) -> None:
    assert not little_to_gain(_quiet(**changed))


INFEASIBLE = {"verdict": "infeasible", "binding": 0}


def _missed(ttft_s: float) -> list[dict[str, Any]]:
    return [
        {"measured_s": ttft_s, "margin": ttft_s / TTFT_BOUND_S - 1, "samples": 1000},
        {"measured_s": 0.02, "margin": -0.3, "samples": 1000},
    ]


def test_infeasible_names_target_floor_and_rate() -> None:
    missed = {name: trial("search", 704, margins=_missed(9.0), feasible=False) for name in ("current", "random_best")}
    trials = [trial("search", 512, margins=_missed(3.5), feasible=False)]
    # A first look at a few windows does not show what is reachable.
    trials.append(trial("search", 512, margins=_missed(1.0), whole_traffic=False, goodput_rps=None, tokens_per_s=None))
    rate = {"scale": 0.43, "rate_rps": 4.3, "width": 0.015, "lowest_scale": 0.015625, "replays": 9}
    best = trial("search", 640, margins=_missed(4.0), feasible=False)
    made = record(**INFEASIBLE, **missed, trials=trials, best=best, feasible=rate)
    assert target_floor_s(made, 0) == 3.5
    (said,) = headline.limit(made)
    for needed in ("time to first token p99 within 2 s", "comes to 4 s", "target alone comes to 3.5 s", "0.43 times"):
        assert needed in said
    assert "4.3 requests/s" in said and "9 replays" in said
    assert "Offered 10 requests/s" in said and "add a replica or move a target" in said


def test_infeasible_only_together_and_at_no_rate() -> None:
    rate = {"scale": None, "rate_rps": None, "width": None, "lowest_scale": 0.015625, "replays": 8}
    best = trial("search", 640, margins=_missed(4.0), feasible=False)
    (said,) = headline.limit(record(**INFEASIBLE, best=best, feasible=rate))
    assert "not together with the others" in said
    assert "Even at 1/64 of this rate" in said and "Missed as well" not in said
    assert "--engine rooftune" in said
    everything = record_values()["search"] | {"knobs": ["step_tokens", "order_policy"]}
    (said,) = headline.limit(record(**INFEASIBLE, best=best, feasible=rate, search=everything))
    assert "--engine" not in said


def test_first_looks_appear_only_in_the_heat_map() -> None:
    made = record()
    whole = [t for t in made.trials if t.whole_traffic]
    bare = record(trials=[t.model_dump() for t in whole])
    heat, trade = budget_and_cap(made), ttft_against_gap(made)
    assert heat is not None and "first looks" in heat.caption
    without = budget_and_cap(bare)
    assert without is not None and "first looks" not in without.caption
    assert heat.svg.count("<circle") - without.svg.count("<circle") == len(made.trials) - len(whole) == 4
    assert trade == ttft_against_gap(bare)
    assert tables.baselines(made) == tables.baselines(bare)


def test_timeline_shows_both_settings_on_one_scale() -> None:
    before, after = timelines(record())
    assert "540 miss a target" in before.caption and "18 miss a target" in after.caption
    assert 'class="block over"' in before.svg and 'class="block over"' not in after.svg
    assert 'class="block within"' in after.svg
    assert "knee 200" in before.svg and "budget 2,048" in before.svg and "budget 704" in after.svg

    axis = [re.findall(r'<text class="tick"[^>]*>([^<]*)<', chart.svg) for chart in (before, after)]
    assert axis[0] == axis[1]
    assert len(timelines(_quiet())) == 1
    assert timelines(record(timeline=None)) == ()


def test_step_curve_without_a_knee_or_a_floor() -> None:
    model = record().step_model.model_dump()
    flat = model | {"coefficients": model["coefficients"] | {"slope_s_per_token": 0.0}, "knee_tokens": "inf"}
    chart = step_curve(record(step_model=flat))
    assert chart is not None and "knee " not in chart.svg
    tables_model = step_curve(record(step_model=model | {"tables": True}))
    assert tables_model is not None and "measured tables" in tables_model.caption


def test_requests_that_can_never_run_are_named_before_any_target() -> None:
    plain = record()
    stuck = plain.model_copy(update={"best": plain.best.model_copy(update={"refused": 3})})
    said = summary(stuck)
    limit = said[said.index("  limit") : said.index("  targets")]
    assert "3 requests need" in limit and "--kv-tokens" in limit
    assert "--kv-tokens" not in summary(plain)


def test_every_other_missed_target_is_named() -> None:
    values = trial("search", 640, margins=_missed(4.0), feasible=False)
    values["margins"][1] |= {"measured_s": 0.0303, "margin": 0.01}
    (said,) = headline.limit(record(**INFEASIBLE, best=values))
    assert "Missed as well: gap between tokens p99 within 30 ms (30.3 ms)." in said

"""Writes docs/policies.md: what each family of settings gains on each traffic, and who waits how long under it.

    python -m tests.bench.policies_page docs/policies.md

Runs the bench ``policies`` in full (minutes on two cores). No figure is a timing of this machine: the same code gives
the same page, except for the public traces, which are left out where they are not beside the project.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rooftune.policies.errors import InputError, RooftuneError
from rooftune.policies.request import DEADLINE, FCFS, FIXED_BUDGET, PRESSURE, STEP_TIME_TARGET, Setting
from tests.bench.policies import PUBLISHED_GAIN, Case, cases, headline
from tests.bench.policies_families import BUDGET, CHUNK_CAP, Row, Waits

_HEAD = """# What policies gain

Written by `python -m tests.bench.policies_page docs/policies.md`; every number comes from that command.

Everything here is **simulated** on the twin with the teaching constants `8b-2tbs`, a KV pool of 600,000 tokens and
256 sequences. A request is good when its first token comes within 2 s and at most 1 % of its own gaps are above 30 ms.
Every family is tuned on the traffic it is judged on, all with the same sampler and number of trials (the joint search
with three times as many). *Won* and *lost* are against the best budget alone, beyond the 90 % interval of the
difference (bootstrap over stretches of the traffic, paired by request); *vs cap* is the same against the best budget
with a chunk cap.

- **budget alone**: one number, the same in every step
- **chunk cap**: budget, and most prompt tokens of one request in a step
- **partial-prefill caps**: also how many prompts may be part-way at once
- **step-time budget**, **pressure budget**: the budget follows the predicted step time, or shrinks while prompts wait
- **shortest first**, **deadline**: which prompt gets the tokens that decodes leave; a prompt that has waited for the
  aging bound goes first, the oldest before the others, so that nobody is passed over for longer
- **all together**: every knob at once
"""


def page(found: Sequence[Case]) -> str:
    """The page, in Markdown."""
    return "\n".join([_HEAD, _summary(found), *(_table(case) for case in found)])


def _summary(found: Sequence[Case]) -> str:
    figures = {figure.name: figure for figure in headline(list(found))}
    over_budget, over_cap = figures["order_gain_mixes"].value, figures["order_gain_over_chunk_cap_mixes"].value
    won, lost = figures["order_families_won"], figures["order_families_lost"]
    lines = [
        "## In short",
        "",
        f"On the three made mixes the best order policy serves {over_budget - 1:+.0%} good requests over the best"
        f" budget alone and {over_cap - 1:+.0%} over the best budget with a chunk cap (mean of the three; published for"
        f" adaptive budgets over the best static setting: {PUBLISHED_GAIN - 1:+.0%}, on other traffic and hardware)."
        f" Of the {won.baseline:.0f} pairs of an order family and a traffic below, {won.value:.0f} won against the"
        f" budget alone and {lost.value:.0f} lost.",
        "",
        "| traffic | budget alone | chunk cap | best order | all together |",
        "|---|---|---|---|---|",
    ]
    for case in found:
        best = case.best_order
        shares = (case.row(name).good_share for name in (BUDGET, CHUNK_CAP, best.family, case.rows[-1].family))
        plain, capped, ordered, joint = (f"{100 * share:.1f} %" for share in shares)
        lines.append(f"| {case.name} | {plain} | {capped} | {ordered} ({best.family}) | {joint} |")
    return "\n".join([*lines, ""])


def _table(case: Case) -> str:
    long = case.rows[0].long.requests
    lines = [
        f"## {case.name}",
        "",
        f"{case.requests:,} requests; {long:,} of them have a long prompt (at least {case.long_tokens:,} tokens)."
        " Everybody, short, long: TTFT in seconds, median / 99 of 100. The longest wait is to a first token.",
        "",
        "| family | good | against budget | vs cap | everybody | short | long | longest wait | setting |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [_line(row) for row in case.rows]
    return "\n".join([*lines, ""])


def _line(row: Row) -> str:
    gain = "-" if row.family == BUDGET else f"{100 * row.gain:+.1f} ± {100 * row.noise:.1f}, {row.verdict}"
    capped = "-" if row.family in (BUDGET, CHUNK_CAP) else f"{100 * row.capped_gain:+.1f}, {row.capped_verdict}"
    waits = " | ".join(_wait(waits) for waits in (row.everybody, row.short, row.long))
    return (
        f"| {row.family} | {100 * row.good_share:.1f} % | {gain} | {capped} | {waits} | {row.longest_wait_s:.1f} s"
        f" | {_setting(row.setting)} |"
    )


def _wait(waits: Waits) -> str:
    return f"{waits.p50_s:.2f} / {waits.p99_s:.1f}" if waits.requests else "-"


def _setting(setting: Setting) -> str:
    parts = [f"budget {setting.step_tokens:,}"]
    if setting.chunk_cap_tokens:
        parts.append(f"cap {setting.chunk_cap_tokens:,}")
    if setting.max_running != Setting(1).max_running:
        parts.append(f"{setting.max_running} sequences")
    if setting.max_partial_prefills:
        parts.append(f"{setting.max_partial_prefills} partial")
    if setting.max_long_partial_prefills:
        parts.append(f"{setting.max_long_partial_prefills} partial from {setting.long_prompt_tokens:,}")
    if setting.budget_policy == STEP_TIME_TARGET:
        parts.append(f"step time {1e3 * setting.budget_target_s:.1f} ms")
    if setting.budget_policy == PRESSURE:
        parts.append(f"{setting.pressure_tokens:,} from {setting.pressure_prefills} prefills on")
    if setting.order_policy != FCFS:
        name = "deadline" if setting.order_policy == DEADLINE else "shortest first"
        parts.append(f"{name}, aging {setting.aging_s:g} s")
    return ", ".join(parts if setting.budget_policy == FIXED_BUDGET else ["most " + parts[0], *parts[1:]])


def main(words: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 with one line when the file cannot be written."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.policies_page", description=__doc__)
    parser.add_argument("file", help="where to write the page")
    parser.add_argument("--short", action="store_true", help="one traffic, few trials: to try the page itself")
    args = parser.parse_args(words)
    target = Path(args.file)
    try:
        if not target.parent.is_dir():
            raise InputError(f"{target.parent} is no folder; make it first")
        found = []
        for case in cases(args.short):
            print(f"{case.name}: done", file=sys.stderr, flush=True)
            found.append(case)
        target.write_text(page(found), encoding="utf-8")
    except RooftuneError as error:
        print(f"policies_page: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The report's plots, each from a record alone."""

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

import numpy as np

from rooftune.policies.slo import GAP_METRICS
from rooftune.tuner.record import BarsPart, Number, RunRecord, TimelinePart, TrialPart
from rooftune.tuner.report import words
from rooftune.tuner.report.headline import after_word
from rooftune.tuner.report.svg import Axis, Plot, Point

ENDLESS_FACTOR = 3.0  # a latency that never came is drawn above the largest one that did
COLOURS = ("t0", "t1", "t2", "t3", "t4", "t5")


def charts(record: RunRecord) -> list[Plot]:
    """Every plot that the record has data for."""
    found = (
        *timelines(record),
        step_curve(record),
        good_against_budget(record),
        tails_against_budget(record),
        ttft_against_gap(record),
        budget_and_cap(record),
    )
    return [plot for plot in found if plot is not None]


def gap_bound_s(record: RunRecord) -> float | None:
    """The tightest target on gaps: what a step may take."""
    return min((part.bound_s for part in record.targets if part.metric in GAP_METRICS), default=None)


def _mark_budgets(plot: Plot, record: RunRecord) -> None:
    """Both budgets as upright lines, the recommended one's word lower."""
    before, after = record.current.step_tokens, record.best.step_tokens
    plot.upright(before, "current", f"in force {words.count(before)}")
    if before != after:
        plot.upright(after, "best", f"{after_word(record)} {words.count(after)}", row=1)


def _mark_settings(plot: Plot, record: RunRecord, place: Callable[[TrialPart], Point | None]) -> None:
    """A diamond for each of the two settings that has a place."""
    for trial, style, word in ((record.current, "current", "in force"), (record.best, "best", after_word(record))):
        point = place(trial)
        if point is not None:
            plot.diamond(point, style, word)


def step_curve(record: RunRecord) -> Plot | None:
    """Step time against tokens: floor, slope, knee and both budgets."""
    curve, model = record.curve, record.step_model.coefficients
    if len(curve.tokens) < 2 or max(curve.live_s) <= 0.0:
        return None
    top, high = float(curve.tokens[-1]), max(*curve.idle_s, *curve.live_s)
    plot = Plot(
        "step",
        "Time of one step against its tokens",
        "Flat up to the knee, then growing with every token.",
        Axis("tokens computed in one step", 0.0, top, show=words.count),
        Axis("step time (ms)", 0.0, high * 1.1, show=lambda value: f"{value * 1e3:g}"),
    )
    floor_s, base_s, slope_s = model["overhead_s"] + model["floor_s"], model["overhead_s"], model["slope_s_per_token"]
    reach = min(top, (high - base_s) / slope_s) if slope_s > 0 else top
    if model["floor_s"] > 0:
        plot.line([(0.0, floor_s), (top, floor_s)], "t5 thin")
    if slope_s > 0 and reach > 0:
        plot.line([(0.0, base_s), (reach, base_s + slope_s * reach)], "t5 thin")
    plot.line(list(zip(curve.tokens, curve.idle_s, strict=True)), "t0")
    plot.line(list(zip(curve.tokens, curve.live_s, strict=True)), "t1")
    plot.legend = [("t0", "one prompt alone"), ("t1", "beside the answers of this traffic"), ("t5", "floor and slope")]
    _mark_budgets(plot, record)
    knee = record.step_model.knee_tokens
    if isinstance(knee, float) and 0 < knee < top:
        at_s = float(np.interp(knee, curve.tokens, curve.idle_s))
        plot.diamond((knee, at_s), "t1", f"knee {words.count(knee)}")
    bound = gap_bound_s(record)
    if bound is not None and bound < high * 1.1:
        plot.level(bound, "bound", f"target {words.seconds(bound)}")
    source = words.SOURCE_WORDS[record.step_model.source].capitalize()
    tables = "its measured tables; floor, slope and knee are of the formula beside them"
    live_knee = curve.knee_live_tokens
    plot.caption = (
        f"{source}: step-time model {record.step_model.name}, {tables if record.step_model.tables else 'its formula'}. "
        f"Floor {words.seconds(floor_s)} with overhead, slope {words.seconds(slope_s)} per token. The second curve "
        f"carries the {words.rate(curve.running_mean)} answers that ran at a time on average, with "
        f"{words.tokens(curve.context_mean_tokens)} of context in all"
        f"{'' if live_knee == 'inf' else f'; there the knee is at {words.tokens(live_knee)}'}."
    )
    return plot


def timelines(record: RunRecord) -> tuple[Plot, ...]:
    """The worst stretch with the setting in force, and the same stretch with the other one."""
    line = record.timeline
    if line is None:
        return ()
    now = _timeline(record, line, line.current, record.current, "in force", "current")
    if not record.moves:
        return (now,)
    return now, _timeline(record, line, line.best, record.best, after_word(record), "best")


def _timeline(record: RunRecord, line: TimelinePart, bars: BarsPart, trial: TrialPart, word: str, style: str) -> Plot:
    both = (line.current, line.best)
    top = max(d + p for part in both for d, p in zip(part.decode_tokens, part.prefill_tokens, strict=True))
    bound = gap_bound_s(record)
    plot = Plot(
        f"line-{style}",
        f"Step by step, {word}",
        "One bar a step or a few neighbouring steps: as wide as it took, as high as the tokens it carried.",
        Axis("seconds of the traffic", line.start_s, line.start_s + line.length_s),
        Axis("tokens in a step", 0.0, max(top * 1.12, 1.0), show=words.count),
        strip=bound is not None,
    )
    spans = [(at, at + took) for at, took in zip(bars.start_s, bars.duration_s, strict=True)]
    tokens = list(zip(spans, bars.decode_tokens, bars.prefill_tokens, strict=True))
    plot.blocks([(*span, 0.0, decode) for span, decode, _ in tokens], "decode")
    plot.blocks([(*span, decode, decode + prefill) for span, decode, prefill in tokens], "prefill")
    plot.legend = [("decode", "answers (decode)"), ("prefill", "prompts (prefill)")]
    if trial.step_tokens <= top * 1.12:
        plot.level(trial.step_tokens, style, f"budget {words.count(trial.step_tokens)}")
    knee = record.step_model.knee_tokens
    if isinstance(knee, float) and 0 < knee <= top * 1.12:
        plot.level(knee, "knee", f"knee {words.count(knee)}")
    if bound is not None:
        plot.under([span for span, worst in zip(spans, bars.longest_s, strict=True) if worst <= bound], "within")
        plot.under([span for span, worst in zip(spans, bars.longest_s, strict=True) if worst > bound], "over")
        plot.legend += [("within", f"strip: within {words.seconds(bound)}"), ("over", f"over {words.seconds(bound)}")]
    plot.caption = _timeline_caption(line, bars, line.bad_best if style == "best" else line.bad_current)
    return plot


def _timeline_caption(line: TimelinePart, bars: BarsPart, bad: int) -> str:
    steps = sum(bars.steps)
    merged = f" A bar is up to {max(bars.steps)} neighbouring steps." if steps > len(bars.steps) else ""
    part = "" if line.length_s == line.minute_s else f", its worst {words.seconds(line.length_s)} shown"
    exact = "" if line.exact else " Replayed from shortly before, so it resembles the whole replay only."
    return (
        f"Simulated: the minute from {words.seconds(line.minute_start_s)} on{part}. Of {words.count(line.requests)} "
        f"requests that arrive in that minute {words.count(bad)} miss a target. {words.count(steps)} steps, the "
        f"longest {words.seconds(max(bars.longest_s))}.{merged}{exact}"
    )


def _budget_axis(trials: Iterable[TrialPart]) -> Axis:
    budgets = [trial.step_tokens for trial in trials]
    return Axis("token budget (tokens per step)", min(budgets) / 1.1, max(budgets) * 1.1, "log2", words.count)


def _sweep(record: RunRecord) -> list[TrialPart]:
    """The budget sweep, ascending."""
    return sorted((trial for trial in record.trials if trial.role == "sweep"), key=lambda trial: trial.step_tokens)


def _over_budgets(record: RunRecord, name: str, title: str, description: str, y: Axis) -> Plot:
    """A plot over the sweep, with both budgets marked and each run of feasible ones shaded."""
    sweep = _sweep(record)
    plot = Plot(name, title, description, _budget_axis([*sweep, record.current, record.best]), y)
    shaded = []
    for feasible, trials in groupby(sweep, key=lambda trial: trial.feasible):
        budgets = [trial.step_tokens for trial in trials]
        if feasible:
            plot.band(budgets[0], budgets[-1], "feasible")
            shaded.append(" to ".join(dict.fromkeys(words.count(end) for end in (budgets[0], budgets[-1]))))
    _mark_budgets(plot, record)
    plot.caption = (
        f"Shaded: budgets that meet every target without a chunk cap ({'; '.join(shaded)} tokens)."
        if shaded
        else "Without a chunk cap, no budget of the sweep meets every target."
    ) + f" Simulated, {words.count(record.traffic.requests)} requests a point, no chunk cap"
    return plot


def good_against_budget(record: RunRecord) -> Plot | None:
    """Share of good requests over the sweep."""
    points = [(trial.step_tokens, trial.attainment) for trial in _sweep(record) if trial.attainment is not None]
    if len(points) < 2:
        return None
    plot = _over_budgets(
        record,
        "good",
        "Good requests against the token budget",
        f"Share of {words.count(record.traffic.requests)} requests that meet every target, by budget.",
        Axis("good requests (%)", 0.0, 1.0, show=lambda value: f"{value * 100:g}"),
    )
    plot.line(points, "t0")
    plot.dots(points, "t0", 2.5)
    for trial, style in ((record.best, "best"), (record.current, "current")):
        if trial.attainment is not None:
            plot.dots([(trial.step_tokens, trial.attainment)], style, 6.0)
    plot.caption += "; the two large dots have their own chunk cap."
    plot.legend = [("t0", "budget alone"), ("best", after_word(record)), ("current", "in force")]
    return plot


def tails_against_budget(record: RunRecord) -> Plot | None:
    """Each target's quantile as a multiple of its bound, over the sweep."""
    rows: list[tuple[str, list[Point], str]] = []
    for index, (style, part) in enumerate(zip(COLOURS, record.targets, strict=False)):
        found = [(trial.step_tokens, trial.margins[index].margin) for trial in _sweep(record)]
        points: list[Point] = [(at, max(margin + 1.0, 1e-3)) for at, margin in found if isinstance(margin, float)]
        if len(points) > 1:
            rows.append((style, points, words.target(part)))
    if not rows:
        return None
    ratios = [y for _, points, _ in rows for _, y in points] + [1.0]
    plot = _over_budgets(
        record,
        "tails",
        "Each target against the token budget",
        "Quantile of each target divided by its bound; 1 or less is met.",
        Axis("multiple of the bound", min(ratios) / 1.3, max(ratios) * 1.3, "log10", "{:g} x".format),
    )
    plot.level(1.0, "bound", "bound: at or below is met")
    for style, points, _ in rows:
        plot.line(points, style)
        plot.dots(points, style, 2.5)
    plot.caption += ". A small budget lets prompts wait, a large one stalls answers."
    plot.legend = [(style, name) for style, _, name in rows]
    return plot


def _latencies(label: str, values: Sequence[Number], bound: float | None) -> tuple[list[float | None], Axis]:
    """Where to draw each value (one that never came: above all others), and an axis that holds them and the bound."""
    top = max((value for value in values if isinstance(value, float) and value > 0), default=1.0) * ENDLESS_FACTOR
    drawn = [top if isinstance(value, str) else value for value in values]
    shown = [value for value in drawn if value] or [1.0]
    ends = [*shown, bound] if bound else shown
    return drawn, Axis(label, min(ends) / 1.2, max(ends) * 1.2, "log10", words.seconds)


def ttft_against_gap(record: RunRecord) -> Plot | None:
    """The trade of the two latencies, every trial one dot."""
    whole = [trial for trial in record.trials if trial.whole_traffic]
    trials = [*whole, record.current, record.best]
    bounds = {(part.metric, part.quantile): part.bound_s for part in record.targets}
    gap_bound, ttft_bound = bounds.get(("gap", 0.99)), bounds.get(("ttft", 0.99))
    gap, x = _latencies("gap p99", [trial.gap_p99_s for trial in trials], gap_bound)
    ttft, y = _latencies("TTFT p99", [trial.ttft_p99_s for trial in trials], ttft_bound)
    placed = [(t, (g, f)) for t, g, f in zip(trials, gap, ttft, strict=True) if g and f]
    if len(placed) < 3:
        return None
    title = "Time to first token against gap, all trials"
    plot = Plot("trade", title, "One dot a trial; lower left is better.", x, y)
    if gap_bound:
        plot.upright(gap_bound, "bound", f"target {words.seconds(gap_bound)}")
    if ttft_bound:
        plot.level(ttft_bound, "bound", f"target {words.seconds(ttft_bound)}")
    for role, style in (("random", "t5"), ("sweep", "t1"), ("search", "t0")):
        plot.dots([point for trial, point in placed if trial.role == role], style, 3.0)
        plot.legend.append((style, words.ROLE_WORDS[role]))
    _mark_settings(plot, record, lambda marked: next((point for trial, point in placed if trial is marked), None))
    plot.caption = (
        f"Simulated, {words.count(len(whole))} trials of {words.count(record.traffic.requests)} requests each. "
        "A dot at the far edge stands for a latency that never came."
    )
    return plot


def budget_and_cap(record: RunRecord) -> Plot | None:
    """Good share over budget and chunk cap, one dot a trial, darker is better."""
    trials = [trial for trial in record.trials if trial.role in ("search", "random") and trial.attainment is not None]
    caps = [trial.chunk_cap_tokens for trial in trials if trial.chunk_cap_tokens]
    if len(trials) < 3 or not caps:
        return None
    highest = max(caps)
    none_at = highest * 2  # no cap is drawn above the largest cap, not at zero
    plot = Plot(
        "heat",
        "Good requests by budget and chunk cap",
        "One dot a trial; the darker, the more requests meet every target.",
        _budget_axis([*trials, record.current, record.best]),
        Axis(
            "chunk cap (tokens)",
            min(caps) / 1.3,
            none_at * 1.3,
            "log2",
            lambda value: words.count(value) if value <= highest else "",
        ),
    )
    plot.level(none_at, "faint", "no chunk cap")
    for trial in sorted(trials, key=lambda trial: trial.attainment or 0.0):
        shade = min(int((trial.attainment or 0.0) * 5), 4)
        plot.dots([(trial.step_tokens, trial.chunk_cap_tokens or none_at)], f"s{shade}", 4.0)
    _mark_settings(plot, record, lambda trial: (trial.step_tokens, trial.chunk_cap_tokens or none_at))
    plot.legend = [(f"s{i}", f"{i * 20} to {i * 20 + 20} %") for i in range(5)]
    plot.caption = f"Simulated, {words.count(len(trials))} trials."
    glances = sum(not trial.whole_traffic for trial in trials)
    if glances:
        plot.caption += (
            f" {words.count(glances)} of them are first looks at a few windows of the traffic, the busiest among them, "
            "so that their shares only say which settings were worth a replay of everything."
        )
    return plot

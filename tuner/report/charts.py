"""The report's plots, each from a record alone."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rooftune.tuner.record import BarsPart, Number, RunRecord, TimelinePart, TrialPart
from rooftune.tuner.report import words
from rooftune.tuner.report.headline import after_word
from rooftune.tuner.report.svg import Axis, Plot, Point

GAP_METRICS = ("gap", "longest_gap", "tpot")


@dataclass(frozen=True)
class Chart:
    """One figure: svg; caption in plain words; legend of (style, words)."""

    title: str
    svg: str
    caption: str
    legend: tuple[tuple[str, str], ...] = ()


def mark_budgets(plot: Plot, record: RunRecord) -> None:
    """Both budgets as upright lines, the recommended one's word lower."""
    before, after = (float(trial.setting["step_tokens"]) for trial in (record.current, record.best))
    plot.upright(before, "current", f"in force {words.count(before)}")
    if before != after:
        plot.upright(after, "best", f"{after_word(record)} {words.count(after)}", row=1)


def gap_bound_s(record: RunRecord) -> float | None:
    """The tightest target on gaps: what a step may take."""
    return min((part.bound_s for part in record.targets if part.metric in GAP_METRICS), default=None)


def _at(xs: tuple[int, ...], ys: tuple[float, ...], x: float) -> float:
    """On the curve, between its points."""
    for (left, low), (right, high) in pairwise(zip(xs, ys, strict=True)):
        if left <= x <= right:
            return low + (high - low) * (x - left) / (right - left)
    return ys[0] if x < xs[0] else ys[-1]


def step_curve(record: RunRecord) -> Chart | None:
    """Step time against tokens: floor, slope, knee and both budgets."""
    curve, model = record.curve, record.step_model.coefficients
    if len(curve.tokens) < 2 or max(curve.live_s) <= 0.0:
        return None
    top, high = float(curve.tokens[-1]), max(*curve.idle_s, *curve.live_s)
    title = "Time of one step against its tokens"
    plot = Plot(
        title,
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
    mark_budgets(plot, record)
    knee = record.step_model.knee_tokens
    if isinstance(knee, float) and 0 < knee < top:
        plot.diamond((knee, _at(curve.tokens, curve.idle_s, knee)), "t1", f"knee {words.count(knee)}")
    bound = gap_bound_s(record)
    if bound is not None and bound < high * 1.1:
        plot.level(bound, "bound", f"target {words.seconds(bound)}")
    source = words.SOURCE_WORDS[record.step_model.source].capitalize()
    how = (
        "its measured tables; floor, slope and knee are of the formula beside them"
        if record.step_model.tables
        else ("its formula")
    )
    caption = (
        f"{source}: step-time model {record.step_model.name}, {how}. Floor {words.seconds(floor_s)} with overhead, "
        f"slope {words.seconds(slope_s)} per token. The second curve carries the {words.decimal(curve.running_mean)} "
        f"answers that ran at a time on average, with {words.tokens(curve.context_mean_tokens)} of context in all"
        + (
            f"; there the knee is at {words.tokens(curve.knee_live_tokens)}."
            if curve.knee_live_tokens != "inf"
            else "."
        )
    )
    legend = (("t0", "one prompt alone"), ("t1", "beside the answers of this traffic"), ("t5", "floor and slope"))
    return Chart(title, plot.render("step"), caption, legend)


def timelines(record: RunRecord) -> tuple[Chart, ...]:
    """The worst stretch with the setting in force, and the same stretch with the other one."""
    line = record.timeline
    if line is None:
        return ()
    found = [_timeline(record, line, line.current, "in force", "current")]
    if record.best.setting != record.current.setting:
        found.append(_timeline(record, line, line.best, after_word(record), "best"))
    return tuple(found)


def _timeline(record: RunRecord, line: TimelinePart, bars: BarsPart, word: str, style: str) -> Chart:
    both = (line.current, line.best)
    top = max(d + p for part in both for d, p in zip(part.decode_tokens, part.prefill_tokens, strict=True))
    trial = record.best if style == "best" else record.current
    budget = float(trial.setting["step_tokens"])
    bound = gap_bound_s(record)
    title = f"Step by step, {word}"
    plot = Plot(
        title,
        "One bar a step or a few neighbouring steps: as wide as it took, as high as the tokens it carried.",
        Axis("seconds of the traffic", line.start_s, line.start_s + line.length_s),
        Axis("tokens in a step", 0.0, max(top * 1.12, 1.0), show=words.count),
        strip=bound is not None,
    )
    rows = list(zip(bars.start_s, bars.duration_s, bars.decode_tokens, bars.prefill_tokens, strict=True))
    plot.blocks([(at, at + took, 0.0, decode) for at, took, decode, _ in rows], "decode")
    plot.blocks([(at, at + took, decode, decode + prefill) for at, took, decode, prefill in rows], "prefill")
    if budget <= top * 1.12:
        plot.level(budget, style, f"budget {words.count(budget)}")
    knee = record.step_model.knee_tokens
    if isinstance(knee, float) and 0 < knee <= top * 1.12:
        plot.level(knee, "knee", f"knee {words.count(knee)}")
    legend = [("decode", "answers (decode)"), ("prefill", "prompts (prefill)")]
    if bound is not None:
        within = [(at, at + took) for (at, took, *_), worst in zip(rows, bars.longest_s, strict=True) if worst <= bound]
        over = [(at, at + took) for (at, took, *_), worst in zip(rows, bars.longest_s, strict=True) if worst > bound]
        plot.under(within, "within")
        plot.under(over, "over")
        legend += [("within", f"strip: within {words.seconds(bound)}"), ("over", f"over {words.seconds(bound)}")]
    return Chart(title, plot.render(f"line-{style}"), _timeline_caption(line, bars, style), tuple(legend))


def _timeline_caption(line: TimelinePart, bars: BarsPart, style: str) -> str:
    steps = sum(bars.steps)
    bad = line.bad_best if style == "best" else line.bad_current
    merged = f" A bar is up to {max(bars.steps)} neighbouring steps." if steps > len(bars.steps) else ""
    part = "" if line.length_s == line.minute_s else f", its worst {words.seconds(line.length_s)} shown"
    text = (
        f"Simulated: the minute from {words.seconds(line.minute_start_s)} on{part}. Of {words.count(line.requests)} "
        f"requests that arrive in that minute {words.count(bad)} miss a target. {words.count(steps)} steps, the "
        f"longest {words.seconds(max(bars.longest_s))}.{merged}"
    )
    return text if line.exact else text + " Replayed from shortly before, so it resembles the whole replay only."


ENDLESS_FACTOR = 3.0  # a latency that never came is drawn above the largest one that did
COLOURS = ("t0", "t1", "t2", "t3", "t4", "t5")


def charts(record: RunRecord) -> tuple[Chart, ...]:
    """Every plot that the record has data for."""
    found = (
        *timelines(record),
        step_curve(record),
        good_against_budget(record),
        tails_against_budget(record),
        ttft_against_gap(record),
        budget_and_cap(record),
    )
    return tuple(chart for chart in found if chart is not None)


def _budget(trial: TrialPart) -> float:
    return float(trial.setting["step_tokens"])


def _cap(trial: TrialPart) -> float:
    return float(trial.setting.get("chunk_cap_tokens", 0))


def sweep_of(record: RunRecord) -> list[TrialPart]:
    """The budget sweep, ascending."""
    return sorted((trial for trial in record.trials if trial.role == "sweep"), key=_budget)


def _number(value: Number) -> float | None:
    return value if isinstance(value, (int, float)) else None


def _budget_axis(values: Iterable[float]) -> Axis:
    kept = list(values)
    low, high = min(kept), max(kept)
    return Axis("token budget (tokens per step)", low / 1.1, high * 1.1, "log2", words.count)


def _feasible_range(plot: Plot, sweep: Sequence[TrialPart]) -> str:
    """Shade each run of feasible budgets; say it in words."""
    said = []
    run: list[float] = []
    for trial in [*sweep, None]:
        if trial is not None and trial.feasible:
            run.append(_budget(trial))
        elif run:
            plot.band(run[0], run[-1], "feasible")
            said.append(words.count(run[0]) if len(run) == 1 else f"{words.count(run[0])} to {words.count(run[-1])}")
            run = []
    if not said:
        return "Without a chunk cap, no budget of the sweep meets every target."
    return f"Shaded: budgets that meet every target without a chunk cap ({'; '.join(said)} tokens)."


def good_against_budget(record: RunRecord) -> Chart | None:
    """Share of good requests over the sweep."""
    sweep = [trial for trial in sweep_of(record) if trial.attainment is not None]
    if len(sweep) < 2:
        return None
    budgets = [_budget(trial) for trial in (*sweep, record.current, record.best)]
    axis = Axis("good requests (%)", 0.0, 1.0, show=lambda value: f"{value * 100:g}")
    title = "Good requests against the token budget"
    n = words.count(record.traffic.requests)
    plot = Plot(title, f"Share of {n} requests that meet every target, by budget.", _budget_axis(budgets), axis)
    said = _feasible_range(plot, sweep)
    mark_budgets(plot, record)
    points = [(_budget(trial), trial.attainment or 0.0) for trial in sweep]
    plot.line(points, "t0")
    plot.dots(points, "t0", 2.5)
    if record.best.attainment is not None:
        plot.dots([(_budget(record.best), record.best.attainment)], "best", 6.0)
    if record.current.attainment is not None:
        plot.dots([(_budget(record.current), record.current.attainment)], "current", 6.0)
    caption = f"{said} Simulated, {n} requests a point, no chunk cap; the two large dots have their own chunk cap."
    legend = (("t0", "budget alone"), ("best", after_word(record)), ("current", "in force"))
    return Chart(title, plot.render("good"), caption, legend)


def tails_against_budget(record: RunRecord) -> Chart | None:
    """Each target's quantile as a multiple of its bound, over the sweep."""
    sweep = sweep_of(record)
    rows: list[tuple[str, list[Point], str]] = []
    for index, part in enumerate(record.targets[: len(COLOURS)]):
        found = [(trial, _number(trial.margins[index].margin)) for trial in sweep]
        points = [(_budget(trial), max(margin + 1.0, 1e-3)) for trial, margin in found if margin is not None]
        if len(points) > 1:
            rows.append((COLOURS[index], points, words.target(part)))
    if not rows:
        return None
    ratios = [y for _, points, _ in rows for _, y in points] + [1.0]
    budgets = [_budget(trial) for trial in (*sweep, record.current, record.best)]
    axis = Axis("multiple of the bound", min(ratios) / 1.3, max(ratios) * 1.3, "log10", "{:g} x".format)
    title = "Each target against the token budget"
    plot = Plot(title, "Quantile of each target divided by its bound; 1 or less is met.", _budget_axis(budgets), axis)
    said = _feasible_range(plot, sweep)
    mark_budgets(plot, record)
    plot.level(1.0, "bound", "bound: at or below is met")
    for style, points, _ in rows:
        plot.line(points, style)
        plot.dots(points, style, 2.5)
    n = words.count(record.traffic.requests)
    caption = (
        f"{said} Simulated, {n} requests a point, no chunk cap. "
        "A small budget lets prompts wait, a large one stalls answers."
    )
    return Chart(title, plot.render("tails"), caption, tuple((style, name) for style, _, name in rows))


def _drawn(values: Sequence[Number]) -> tuple[list[float | None], float, float]:
    """Finite values as they are, endless ones above all others; lowest and highest of those drawn."""
    finite = [float(value) for value in values if isinstance(value, (int, float)) and value > 0]
    top = max(finite, default=1.0) * ENDLESS_FACTOR
    drawn = [top if value == "inf" else _number(value) for value in values]
    shown = [value for value in drawn if value is not None and value > 0]
    return drawn, min(shown, default=1.0), max(shown, default=1.0)


def ttft_against_gap(record: RunRecord) -> Chart | None:
    """The trade of the two latencies, every trial one dot."""
    whole = [trial for trial in record.trials if trial.whole_traffic]
    trials = [*whole, record.current, record.best]
    ttft, ttft_low, ttft_high = _drawn([trial.ttft_p99_s for trial in trials])
    gap, gap_low, gap_high = _drawn([trial.gap_p99_s for trial in trials])
    placed = [(t, (g, f)) for t, g, f in zip(trials, gap, ttft, strict=True) if g and f]
    if len(placed) < 3:
        return None
    bounds = {(part.metric, part.quantile): part.bound_s for part in record.targets}
    gap_bound, ttft_bound = bounds.get(("gap", 0.99)), bounds.get(("ttft", 0.99))
    x_values = [gap_low, gap_high, *([gap_bound] if gap_bound else [])]
    y_values = [ttft_low, ttft_high, *([ttft_bound] if ttft_bound else [])]
    title = "Time to first token against gap, all trials"
    plot = Plot(
        title,
        "One dot a trial; lower left is better.",
        Axis("gap p99", min(x_values) / 1.2, max(x_values) * 1.2, "log10", words.seconds),
        Axis("TTFT p99", min(y_values) / 1.2, max(y_values) * 1.2, "log10", words.seconds),
    )
    if gap_bound:
        plot.upright(gap_bound, "bound", f"target {words.seconds(gap_bound)}")
    if ttft_bound:
        plot.level(ttft_bound, "bound", f"target {words.seconds(ttft_bound)}")
    kinds = (("random", "t5"), ("sweep", "t1"), ("search", "t0"))
    for role, style in kinds:
        plot.dots([point for trial, point in placed if trial.role == role], style, 3.0)
    for trial, style, label in ((record.current, "current", "in force"), (record.best, "best", after_word(record))):
        point = next((place for found, place in reversed(placed) if found is trial), None)
        if point is not None:
            plot.diamond(point, style, label)
    legend = tuple((style, words.ROLE_WORDS[role]) for role, style in kinds)
    caption = (
        f"Simulated, {words.count(len(whole))} trials of {words.count(record.traffic.requests)} requests each. "
        "A dot at the far edge stands for a latency that never came."
    )
    return Chart(title, plot.render("trade"), caption, legend)


def budget_and_cap(record: RunRecord) -> Chart | None:
    """Good share over budget and chunk cap, one dot a trial, darker is better."""
    trials = [trial for trial in record.trials if trial.role in ("search", "random") and trial.attainment is not None]
    caps = [_cap(trial) for trial in trials if _cap(trial) > 0]
    if len(trials) < 3 or not caps:
        return None
    none_at = max(caps) * 2  # no cap is drawn above the largest cap, not at zero
    marked = [record.current, record.best]
    budgets = [_budget(trial) for trial in (*trials, *marked)]

    def show(value: float) -> str:
        return words.count(value) if value <= max(caps) else ""

    title = "Good requests by budget and chunk cap"
    plot = Plot(
        title,
        "One dot a trial; the darker, the more requests meet every target.",
        _budget_axis(budgets),
        Axis("chunk cap (tokens)", min(caps) / 1.3, none_at * 1.3, "log2", show),
    )
    plot.level(none_at, "faint", "no chunk cap")
    for trial in sorted(trials, key=lambda t: t.attainment or 0.0):
        shade = min(int((trial.attainment or 0.0) * 5), 4)
        plot.dots([(_budget(trial), _cap(trial) or none_at)], f"s{shade}", 4.0)
    for trial, style, label in ((record.current, "current", "in force"), (record.best, "best", after_word(record))):
        plot.diamond((_budget(trial), _cap(trial) or none_at), style, label)
    legend = tuple((f"s{i}", f"{i * 20} to {i * 20 + 20} %") for i in range(5))
    caption = f"Simulated, {words.count(len(trials))} trials."
    glances = sum(not trial.whole_traffic for trial in trials)
    if glances:
        caption += (
            f" {words.count(glances)} of them are first looks at a few windows of the traffic, the busiest among them, "
            "so that their shares only say which settings were worth a replay of everything."
        )
    return Chart(title, plot.render("heat"), caption, legend)

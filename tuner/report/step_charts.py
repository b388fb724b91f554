"""Plots of single steps: their time against their tokens, and the worst stretch of the traffic step by step."""

from dataclasses import dataclass
from itertools import pairwise

from rooftune.tuner.record import BarsPart, RunRecord, TimelinePart
from rooftune.tuner.report import words
from rooftune.tuner.report.headline import after_word
from rooftune.tuner.report.svg import Axis, Plot

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

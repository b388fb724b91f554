"""How far to trust a recommendation, in words: a verdict, what to look at after the change, and every caveat."""

from rooftune.tuner.record import RunRecord
from rooftune.tuner.report import words


def verdict(record: RunRecord) -> str:
    """One line: measured, or simulated with a twin that was checked or not; and what that is good for."""
    source = record.step_model.source
    times = "step times you gave" if source == "given" else f"{source} step times"
    if source == "assumed":
        times += f" ({record.step_model.name}: constants, not your hardware)"
    if record.twin_error:
        worst = max(abs(error) for error in record.twin_error.values())
        how = f"Simulated, with a checked twin (off by at most {words.share(worst)} where checked) and {times}"
    else:
        how = f"Simulated, not measured, by a twin that was not compared with your engine, with {times}"
    if not record.moves:
        return f"{how}."
    if record.twin_error and source == "measured":
        return f"{how}. Start with one server all the same."
    direction = "A direction, not a forecast: try" if source == "assumed" else "Try"
    return f"{how}. {direction} it on one server first."


def watch(record: RunRecord) -> str:
    """What to look at after the change, by the names of the targets; empty when nothing is set."""
    if not record.moves:
        return ""
    if not record.targets:
        now = words.output(record.best)
        return f"After the change look at the output tokens per second (simulated {now}). Undo it if they fall."
    looked_at = [
        f"{words.target(part)} (simulated {words.seconds(row.measured_s)})"
        for part, row in zip(record.targets, record.best.margins, strict=True)
    ]
    return (
        f"After the change look at {'; '.join(looked_at)}. "
        "Undo it if one is clearly worse than both its target and its simulated value."
    )


def caveats(record: RunRecord) -> tuple[str, ...]:
    """What the verdict rests on, a sentence each."""
    model = record.step_model
    found = ["All latencies are simulated: the traffic was replayed on a twin of the scheduler, not on your engine."]
    if record.traffic.output_max_tokens == 1:
        found.append("Each answer is one token (a prefill-only engine), so only the time to first token was tuned.")
    elif record.targets and all(target.metric in ("ttft", "queue") for target in record.targets):
        found.append("Only the time to first token has a target, so gaps between tokens were not looked at.")
    if not record.twin_error:
        found.append("The twin has not been checked against your engine, so check the first minutes after a change.")
    where = "assumed, not measured on your hardware" if model.source == "assumed" else model.source
    found.append(f"The step-time model {model.name} is {where}: {model.origin}.")
    assumed = [word for name, word in words.ENGINE_WORDS.items() if record.engine.sources.get(name) == "assumed"]
    if record.current_source == "assumed":
        assumed.insert(0, f"setting in force (budget {words.tokens(record.current.step_tokens)})")
    if assumed:
        found.append(f"Rooftune also assumed these, because you gave no value: {', '.join(assumed)}.")
    if record.burst_attainment is not None:
        found.append(
            "With a burst (the same requests, arriving twice as fast for a tenth of the traffic's "
            f"{words.seconds(record.traffic.span_s)}) {words.share(record.burst_attainment)} of requests would still "
            "be good with this setting."
        )
    unjudged = [
        words.target(part) for part, row in zip(record.targets, record.best.margins, strict=True) if not row.samples
    ]
    if unjudged:
        found.append(f"No sample for {'; '.join(unjudged)} in this traffic, so that could not be judged.")
    return tuple(found)

"""``rooftune fit``: from measured steps, or a card's layer profile, to a step model with its intervals and gaps."""

import argparse
import json
import math
from functools import partial
from pathlib import Path
from textwrap import shorten

from rooftune.policies.commands import Command
from rooftune.policies.errors import InputError
from rooftune.policies.step_time import StepCost, StepModel
from rooftune.tuner.cli.flags.values import add_value, flag_of, parse_choice, parse_count, parse_positive
from rooftune.tuner.cli.output import check_out_file
from rooftune.tuner.model.fit import first_steps_cost, fit_steps, seen_before
from rooftune.tuner.model.model_file import ModelFile, write_model_file
from rooftune.tuner.model.prior import CARDS, PRECISION_BYTES, card_prior
from rooftune.tuner.model.profile import read_profile
from rooftune.tuner.model.reservoir import Reservoir
from rooftune.tuner.model.roofline import Interval, StepFit, mape
from rooftune.tuner.model.sample_file import read_steps
from rooftune.tuner.model.samples import StepSamples, join, split_alternating
from rooftune.tuner.model.solver import NAMES
from rooftune.tuner.report.plots import step_time_plot

# Factor and unit in which people read each coefficient.
_SHOWN: dict[str, tuple[str, float, str]] = {
    "overhead_s": ("overhead", 1e3, "ms a step"),
    "sequence_s": ("per request", 1e6, "us"),
    "floor_s": ("floor", 1e3, "ms"),
    "kv_s_per_token": ("per context token", 1e9, "ns"),
    "slope_s_per_token": ("slope, per token", 1e6, "us"),
    "attention_s": ("per query-key pair", 1e12, "ps"),
}
_DEFAULTS: dict[str, int | str] = {"keep": 4096, "seed": 0, "first_seen": "auto", "cards": 1, "precision": "bf16"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``fit``."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--steps", nargs="+", metavar="FILE", help="step-sample files, CSV or JSON lines, also .gz")
    source.add_argument(
        "--profile", metavar="DIR", help="a card's layer profile: dense.csv, per_sequence.csv, attention.csv"
    )
    layers = "layers of the model (num_hidden_layers), needed with --profile"
    add_value(parser, "--layers", parse_count, "N", layers)
    parser.add_argument("--out", metavar="FILE", help="write the model here (JSON), for --step-model elsewhere")
    parser.add_argument("--plot", metavar="FILE", help="write the picture here (SVG; default: --out with .svg)")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    limits = parser.add_argument_group("sampling")
    keep = partial(parse_count, low=64, high=1_000_000)
    add_value(limits, "--keep", keep, "N", "steps kept, evenly over tokens (default 4096)")
    add_value(limits, "--seed", partial(parse_count, low=0), "N", "which steps are kept (default 0)")
    first_seen = (
        "the first step of each size, which pays for preparing kernels on CPU engines: keep, drop, or auto (drop "
        "when these take clearly longer than later steps; the default)"
    )
    add_value(limits, "--first-seen", partial(parse_choice, known=("auto", "keep", "drop")), "WHAT", first_seen)
    prior = parser.add_argument_group("hardware prior, for what the steps do not show")
    cards = sorted(CARDS)
    add_value(prior, "--card", partial(parse_choice, known=cards), "NAME", f"one of {', '.join(cards)}")
    add_value(prior, "--cards", parse_count, "N", "cards that share the model (default 1)")
    add_value(prior, "--parameters", parse_positive, "N", "parameters of the model, e.g. 8e9")
    precisions = f"one of {', '.join(PRECISION_BYTES)} (default bf16)"
    add_value(prior, "--precision", partial(parse_choice, known=PRECISION_BYTES), None, precisions)
    parser.set_defaults(**_DEFAULTS)


def run(arguments: argparse.Namespace) -> int:
    """Fit, print, and write the files that are named: both or none, so their paths are looked at first."""
    for flag, path in (("--out", arguments.out), ("--plot", arguments.plot)):
        if path is not None:
            check_out_file(path, flag)
    if arguments.plot is not None and Path(arguments.plot).suffix != ".svg":
        raise InputError(f"--plot is {arguments.plot!r}, must end in .svg, which is what it writes; rename it")
    if arguments.profile is not None:
        return _run_profile(arguments)
    if arguments.layers is not None:
        raise InputError("--layers goes with --profile only; drop it, steps are of the whole model")
    prior = _prior(arguments)
    keep, seed = arguments.keep, arguments.seed
    everything = join([read_steps(path) for path in arguments.steps])
    steps, fit, warmth = _fitted(everything, prior, keep, seed, arguments.first_seen)
    errors = _errors(steps, fit, prior, keep, seed)
    source = shorten(f"{len(steps)} steps of {', '.join(Path(path).name for path in arguments.steps)}", 500)
    _write(arguments, source, fit, errors, steps)
    if arguments.json:
        print(json.dumps({**_document(fit, errors), "left_out_first_seen": len(everything) - len(steps)}))
    else:
        print(_text(fit, errors, len(everything), warmth))
    return 0


def _write(
    arguments: argparse.Namespace,
    source: str,
    fit: StepFit,
    errors: dict[str, float],
    steps: StepSamples,
    cost: StepCost | None = None,
) -> None:
    """The model and the picture, each where it is wanted. cost: the tables that go with the formula."""
    if arguments.out:
        codes = tuple(code.value for code in fit.codes)
        write_model_file(Path(arguments.out), ModelFile(fit.model, source, fit.bounds(), codes, errors, cost))
    plot = arguments.plot or (str(Path(arguments.out).with_suffix(".svg")) if arguments.out else None)
    if plot:
        step_time_plot(plot, steps, fit.model, fit.knee_interval)


def _fitted(
    steps: StepSamples, prior: StepModel | None, keep: int, seed: int, first_seen: str
) -> tuple[StepSamples, StepFit, str]:
    """The steps that count, the fit to them, and what was left out in words (empty: nothing)."""
    again = steps.select(seen_before(steps))
    if first_seen == "drop":
        return again, fit_steps(_kept(again, keep, seed), prior), _left_out(steps, again)
    fit = fit_steps(_kept(steps, keep, seed), prior)
    dearer = 0.0 if first_seen == "keep" else first_steps_cost(steps, fit.model)
    if dearer == 0.0:
        return steps, fit, ""
    why = f"they take {dearer:.0%} longer than later ones (--first-seen keep takes them in)"
    return again, fit_steps(_kept(again, keep, seed), prior), f"{_left_out(steps, again)}: {why}"


def _left_out(steps: StepSamples, again: StepSamples) -> str:
    return f"{len(steps) - len(again):,} first steps of their size"


def _run_profile(arguments: argparse.Namespace) -> int:
    """Put a profile's kernels together, fit the formula beside its tables, print, and write the named files."""
    if arguments.layers is None:
        raise InputError("--profile is of one layer; say with --layers how many the model has (num_hidden_layers)")
    if arguments.card is not None or arguments.parameters is not None:
        raise InputError("a profile is measured and needs no hardware prior; drop --card and --parameters")
    _refuse_idle(arguments, ("cards", "precision", "keep", "seed", "first_seen"), "with --profile")
    profile = read_profile(arguments.profile, arguments.layers)
    fit = profile.fit
    errors = {"fitted_mape": mape(fit.model, profile.steps), "held_out_mape": profile.formula_mape}
    source = f"layer profile {Path(arguments.profile).resolve().name}, {profile.layers} layers"
    _write(arguments, source, fit, errors, profile.steps, profile.cost)
    if arguments.json:
        tables = {"max_tokens": profile.max_tokens, "graph_sizes": list(profile.graph_sizes), "layers": profile.layers}
        print(json.dumps({**_document(fit, errors), "profile": tables}))
        return 0
    padded = f"steps padded to {len(profile.graph_sizes)} graph sizes" if profile.graph_sizes else "nothing padded"
    lines = [
        f"profile    {profile.layers} layers, steps of 1 to {profile.max_tokens:,} tokens, {padded}",
        "           the twin prices steps by these tables; the formula below is fitted to steps made from them",
        _text(fit, errors, len(profile.steps)),
    ]
    print("\n".join(lines))
    return 0


def _prior(arguments: argparse.Namespace) -> StepModel | None:
    if arguments.card is None and arguments.parameters is None:
        _refuse_idle(arguments, ("cards", "precision"), "without --card")
        return None
    if arguments.card is None or arguments.parameters is None:
        raise InputError("a hardware prior needs both --card and --parameters; give both or neither")
    return card_prior(arguments.card, arguments.parameters, arguments.precision, arguments.cards)


def _refuse_idle(arguments: argparse.Namespace, names: tuple[str, ...], where: str) -> None:
    """Raises InputError for a flag that would silently do nothing."""
    for name in names:
        if getattr(arguments, name) != _DEFAULTS[name]:
            raise InputError(f"{flag_of(name)} does nothing {where}; drop it")


def _kept(steps: StepSamples, keep: int, seed: int) -> StepSamples:
    reservoir = Reservoir(keep, seed)
    reservoir.add(steps)
    return reservoir.samples


def _errors(steps: StepSamples, fit: StepFit, prior: StepModel | None, keep: int, seed: int) -> dict[str, float]:
    """Error on the steps fitted and, when there are enough, on blocks that a second fit has not seen."""
    errors = {"fitted_mape": mape(fit.model, steps)}
    try:
        seen, unseen = split_alternating(steps)
    except InputError:
        return errors
    return {**errors, "held_out_mape": mape(fit_steps(_kept(seen, keep, seed), prior, fit.model).model, unseen)}


def _document(fit: StepFit, errors: dict[str, float]) -> dict[str, object]:
    def plain(value: float | None) -> float | None:
        return value if value is not None and math.isfinite(value) else None

    return {
        "model": fit.model._asdict(),
        "intervals": {name: [plain(low), plain(high)] for name, (low, high) in fit.bounds().items()},
        "knee_tokens": fit.knee_tokens,
        "knee_at_context_tokens": fit.knee_at_context_tokens,
        "context_tokens": fit.context_tokens,
        "codes": [code.value for code in fit.codes],
        "steps": fit.steps,
        "spread": fit.spread,
        "outliers": fit.outliers,
        "errors": errors,
    }


def _text(fit: StepFit, errors: dict[str, float], steps: int, left_out: str = "") -> str:
    low, high = fit.seen_tokens
    lines = [
        f"steps      {steps:,} read, {fit.steps:,} fitted, {low:g} to {high:g} tokens a step",
        *([f"left out   {left_out}"] if left_out else []),
        f"spread     {fit.spread:.1%} about the model; {fit.outliers:.1%} outliers ignored",
        f"error      {errors['fitted_mape']:.1%} on the steps read"
        + (f", {errors['held_out_mape']:.1%} on held-out steps" if "held_out_mape" in errors else ""),
        "",
        f"{'coefficient':<20}{'value':>12}  {'95 % interval':<26}unit",
    ]
    for name in NAMES:
        label, factor, unit = _SHOWN[name]
        value = getattr(fit.model, name) * factor
        lines.append(f"{label:<20}{value:>12.4g}  {_range(fit.intervals[name], factor):<26}{unit}")
    sharp = fit.model.sharpness
    shown = "hard" if sharp == 0.0 else f"{sharp:.3g}"
    lines.append(f"{'sharpness':<20}{shown:>12}  {_range(fit.intervals['sharpness'], 1.0):<26}")
    lines += ["", _knee("knee", fit.knee_tokens, fit.knee_interval)]
    live = f"knee at {fit.context_tokens:,.0f} context tokens"
    lines.append(_knee(live, fit.knee_at_context_tokens, fit.knee_at_context_interval))
    if fit.codes:
        lines += ["", "not known:", *(f"  {finding}" for finding in fit.findings())]
    return "\n".join(lines)


def _range(interval: Interval, factor: float) -> str:
    high = "unbounded" if math.isinf(interval.high) else f"{interval.high * factor:.4g}"
    return f"{interval.low * factor:.4g} .. {high}" if math.isfinite(interval.low) else "hard"


def _knee(label: str, value: float | None, interval: Interval) -> str:
    if value is not None:
        return f"{label}: {value:,.0f} tokens, 95 % interval {interval.low:,.0f} to {interval.high:,.0f}"
    low = f"above {interval.low:,.0f}" if interval.low > 0.0 else ""
    high = f"below {interval.high:,.0f}" if math.isfinite(interval.high) else ""
    bounds = " and ".join(part for part in (low, high) if part)
    return f"{label}: not in these steps" + (f"; {bounds} tokens if there is one" if bounds else "")


COMMAND = Command(
    "fit", "fit the step-time model to measured steps, or build it from a card's layer profile", add_arguments, run
)

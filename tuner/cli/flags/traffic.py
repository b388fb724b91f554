"""Flags that say which traffic is replayed, on which step-time model, the same for every command that uses the twin."""

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from rooftune.policies.step_time import NAMED_MODELS, StepCost, StepModel, priced
from rooftune.tuner.cli.flags.values import (
    add_value,
    parse_burst,
    parse_choice,
    parse_duration,
    parse_pair,
    parse_rate_scale,
)
from rooftune.tuner.files import shown_path
from rooftune.tuner.model.intervals import model_draws
from rooftune.tuner.model.model_file import load_step_model, read_model_file
from rooftune.tuner.record import StepModelPart
from rooftune.tuner.report.build import step_model_part
from rooftune.tuner.traffic.reshape import Burst, add_burst, scale_rate, window
from rooftune.tuner.traffic.traces import FORMATS, load_traffic
from rooftune.tuner.traffic.workload import Traffic

TEACHING = "teaching values, calculated and not measured on any hardware"


def add_traffic_flags(parser: argparse.ArgumentParser, *, needed: bool = True) -> None:
    """Which requests, and what is done to their times: first the window, then the rate, then the burst."""
    group = parser.add_argument_group("traffic")
    group.add_argument("--traffic", required=needed, metavar="FILE", help="trace or traffic file (CSV or JSON lines)")
    formats = f"{', '.join(FORMATS)} (default auto: by the first line)"
    add_value(group, "--format", partial(parse_choice, known=FORMATS), None, formats, default="auto")
    group.add_argument("--sort", action="store_true", help="sort requests that are out of order, instead of refusing")
    add_value(group, "--window", _window, "START:LEN", "only what arrives in it, e.g. 600s:10m, in the file's time")
    add_value(group, "--rate-scale", parse_rate_scale, "X", "arrivals X times as fast (default 1)", default=1.0)
    add_value(group, "--burst", _burst, "SPEC", "2x@0.5:60s: twice as fast for 60 s from the middle on")


def read_traffic(args: argparse.Namespace) -> tuple[Traffic, tuple[str, ...]]:
    """The traffic as it will be replayed, named after its file, and what was done to its times. Raises InputError."""
    factor: float = args.rate_scale
    traffic = load_traffic(args.traffic, format=args.format, sort=args.sort)
    name, changes = traffic.name, []
    if args.window is not None:
        start_s, length_s = args.window
        traffic = window(traffic, start_s, length_s)
        changes.append(f"{length_s:g} s from {start_s:g} s on")
    if factor != 1.0:
        traffic = scale_rate(traffic, factor)
        changes.append(f"arrivals {factor:g} times as fast")
    if args.burst is not None:
        text, burst = args.burst
        traffic = add_burst(traffic, burst)
        changes.append(f"burst {text}")
    return replace(traffic, name=name), tuple(changes)


def _window(text: str, what: str) -> tuple[float, float]:
    start, length = parse_pair(text, what, "START:LEN", "600s:10m")
    return parse_duration(start, f"start of {what}", zero=True), parse_duration(length, f"length of {what}")


def _burst(text: str, what: str) -> tuple[str, Burst]:
    """The burst, with its text for the report."""
    return text.strip(), parse_burst(text, what)


def without_prefixes(traffic: Traffic) -> Traffic:
    """The same requests for an engine that finds no prefix again."""
    none = np.zeros(0, dtype=np.int64)
    return replace(
        traffic,
        cached_tokens=np.zeros_like(traffic.cached_tokens),
        prefix_offsets=none,
        prefix_keys=none,
        prefix_span_tokens=0,
    )


def add_model_flag(parser: argparse.ArgumentParser, *, needed: bool = True) -> None:
    """How long a step takes."""
    names = ", ".join(sorted(NAMED_MODELS))
    parser.add_argument(
        "--step-model",
        required=needed,
        metavar="NAME|FILE",
        help=f"how long a step takes: {names}, or a fitted model.json",
    )


def read_draws(name: str, seed: int) -> tuple[StepModel, ...]:
    """Other models that the fit's intervals allow; none for a named set or for measured tables. Raises InputError."""
    if name in NAMED_MODELS:
        return ()
    fitted = read_model_file(Path(name))
    return () if fitted.cost is not None else model_draws(fitted.model, fitted.intervals, seed=seed)


def read_model(name: str) -> tuple[StepModel | StepCost, StepModelPart]:
    """A named set's coefficients or a file's, tables where it has any, and where they came from. Raises InputError."""
    model = load_step_model(name)
    formula = priced(model).formula
    if name in NAMED_MODELS:
        return model, step_model_part(name, formula, "assumed", TEACHING)
    fitted = read_model_file(Path(name))
    origin = fitted.source or "a fitted model file that does not say where its steps came from"
    shown_name, tables = shown_path(Path(name).name), fitted.cost is not None
    part = step_model_part(shown_name, formula, "measured", origin, fitted.codes, dict(fitted.errors), tables=tables)
    return model, part

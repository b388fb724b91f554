"""Flags for latency targets: ``--ttft-p99 2s``, ``--gap-p99.9 80ms``, or a named profile."""

import argparse
from functools import partial

from rooftune.policies.errors import InputError
from rooftune.policies.slo import PROFILES, Metric, Slo, Target
from rooftune.tuner.cli.flags.values import add_value, parse_choice, parse_duration

METRICS: dict[str, tuple[Metric, str]] = {
    "ttft": ("ttft", "arrival to first token"),
    "gap": ("gap", "between neighbouring tokens"),
    "tpot": ("tpot", "mean gap of a request"),
    "longest-gap": ("longest_gap", "longest gap of a request"),
    "e2e": ("e2e", "arrival to last token"),
    "queue": ("queue", "arrival to first work on it"),
}
# argparse knows no patterns, so the quantiles are a closed list: every whole one, and what people use above p99.
QUANTILES: tuple[str, ...] = (*(str(q) for q in range(1, 100)), "99.5", "99.9", "99.95", "99.99", "99.999", "100")


def _target(text: str, flag: str, metric: Metric, quantile: str) -> tuple[str, Target]:
    """The target, with the flag that gave it."""
    return flag, Target(metric, parse_duration(text, flag), round(float(quantile) / 100.0, 9))


def add_target_flags(parser: argparse.ArgumentParser) -> None:
    """Every metric at every quantile; the help shows p99 for each."""
    parser.set_defaults(targets=[])
    group = parser.add_argument_group(
        "targets (pNN: any of p1 to p99, p99.5, p99.9, p99.95, p99.99, p99.999, p100; several may be given)"
    )
    for flag, (metric, meaning) in METRICS.items():
        for quantile in QUANTILES:
            shown = f"{meaning}; also {flag}-p50, -p95, ..." if quantile == "99" else argparse.SUPPRESS
            name = f"--{flag}-p{quantile}"
            group.add_argument(
                name,
                type=partial(_target, flag=name, metric=metric, quantile=quantile),
                action="append",
                dest="targets",
                metavar="TIME",
                help=shown,
            )
    names = ", ".join(PROFILES)
    add_value(group, "--profile", partial(parse_choice, known=PROFILES), "NAME", f"named targets instead: {names}")
    # With several hundred flags an abbreviation would only ever be ambiguous, at length.
    parser.allow_abbrev = False


def read_slo(args: argparse.Namespace, *, needed: bool = True) -> Slo:
    """The targets. Without any: InputError, or (not ``needed``) tokens per second."""
    if args.profile is not None:
        if args.targets:
            raise InputError(f"--profile {args.profile} and {args.targets[0][0]} exclude each other; keep one")
        return PROFILES[args.profile]
    if not args.targets:
        if needed:
            raise InputError("no target given; give one, such as --ttft-p99 2s --gap-p99 30ms, or --profile chat")
        return Slo((), objective="tokens_per_s")
    return Slo(tuple(target for _, target in args.targets))

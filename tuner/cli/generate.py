"""``rooftune generate``: made traffic, written as a general traffic file."""

import argparse
import json
import sys
from functools import partial

import numpy as np

from rooftune.policies.commands import Command
from rooftune.policies.errors import InputError
from rooftune.tuner.cli.flags.values import (
    add_value,
    flag_of,
    parse_choice,
    parse_count,
    parse_duration,
    parse_lengths,
    parse_number,
    parse_pair,
    parse_positive,
    parse_rate,
    parse_share,
)
from rooftune.tuner.files import shown_path
from rooftune.tuner.traffic.file import write_traffic
from rooftune.tuner.traffic.generate import (
    DAY_S,
    MAX_SEED,
    NAMED_MIXES,
    Arrivals,
    Day,
    Exponential,
    Gamma,
    Lengths,
    Poisson,
    RequestClass,
    Uniform,
    generate,
    named_mix,
    with_rare_class,
)
from rooftune.tuner.traffic.traces import load_lengths
from rooftune.tuner.traffic.workload import Traffic

_SHAPES = ("poisson", "gamma", "day")
_EXAMPLE = """examples:
  chat with documents, one prompt in 30 of 60,000 to 100,000 tokens:
    rooftune generate --rate 3 --span 10m --prompt 100-1500 --output exp:200 --long 1/30:60000-100000 --out mix.csv
  bursts of chat:               rooftune generate --shape gamma --cv 3 --rate 5 --span 10m --mix chat --out bursts.csv
  a day, four times as busy at 14:00 as at night:
    rooftune generate --shape day --rate 2 --span 1d --peak-to-trough 4 --mix rag --out day.csv
  lengths of a real service:    rooftune generate --rate 4 --span 1h --lengths lengths.csv --out real-lengths.csv

LENGTHS is 1000 (always), 100-1500 (uniform), exp:200 (exponential, mean 200) or lognormal:800,1.0 (median, sigma)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``generate``."""
    parser.epilog = _EXAMPLE
    arrivals = parser.add_argument_group("arrivals")
    shapes = "poisson (default), gamma (bursts) or day (a daily wave)"
    add_value(arrivals, "--shape", partial(parse_choice, known=_SHAPES), None, shapes, default="poisson")
    add_value(arrivals, "--rate", parse_rate, "RPS", "requests per second, on average", required=True)
    add_value(arrivals, "--span", parse_duration, "TIME", "how long, e.g. 600s, 10m, 1d", required=True)
    add_value(arrivals, "--cv", parse_positive, "X", "gamma: standard deviation over mean of the gaps (default 3)")
    ratio = partial(parse_number, low=1.0, high=1000.0)
    add_value(arrivals, "--peak-to-trough", ratio, "X", "day: busiest rate over quietest (default 4)")
    peak_at = partial(parse_duration, zero=True)
    add_value(arrivals, "--peak-at", peak_at, "TIME", "day: when the peak comes (default 14h of 24)")
    add_value(arrivals, "--day-length", parse_duration, "TIME", "day: how long a day lasts (default 24h)")
    lengths = parser.add_argument_group("lengths, one of --mix, --lengths, or --prompt with --output")
    mixes = f"a named mix: {', '.join(NAMED_MIXES)}"
    add_value(lengths, "--mix", partial(parse_choice, known=NAMED_MIXES), "NAME", mixes)
    lengths.add_argument("--lengths", metavar="FILE", help="CSV of prompt and output lengths to draw pairs from")
    add_value(lengths, "--prompt", parse_lengths, "LENGTHS", "prompt tokens (default 100-1500)")
    add_value(lengths, "--output", parse_lengths, "LENGTHS", "output tokens (default exp:200)")
    add_value(lengths, "--long", _long, "SHARE:LENGTHS", "rare long prompts, e.g. 1/30:60000-100000")
    cached = "share of each prompt in the prefix cache (default 0)"
    add_value(lengths, "--cached", parse_share, "SHARE", cached, default=0.0)
    seed = partial(parse_count, low=0, high=MAX_SEED)
    add_value(parser, "--seed", seed, "N", "same seed, same traffic (default 0)", default=0)
    parser.add_argument("--out", required=True, metavar="FILE", help="the traffic file to write (CSV)")
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object")


def _long(text: str, what: str) -> tuple[float, Lengths]:
    """Share and lengths of rare long prompts."""
    share, lengths = parse_pair(text, what, "SHARE:LENGTHS", "1/30:60000-100000")
    return parse_share(share, f"share of {what}", ends=False), parse_lengths(lengths, what)


def run(args: argparse.Namespace) -> int:
    """Write the file and print what is in it. Raises InputError; a failed run leaves no file behind."""
    traffic = generate(_arrivals(args), _classes(args), args.span, args.seed, name=shown_path(args.out))
    write_traffic(args.out, traffic)
    _print_summary(traffic, args.span, args.json)
    return 0


def _arrivals(args: argparse.Namespace) -> Arrivals:
    owner = {"cv": "gamma", "peak_to_trough": "day", "peak_at": "day", "day_length": "day"}
    for flag, shape in owner.items():
        if getattr(args, flag) is not None and args.shape != shape:
            raise InputError(f"{flag_of(flag)} belongs to --shape {shape}, not {args.shape!r}; drop it")
    if args.shape == "poisson":
        return Poisson(args.rate)
    if args.shape == "gamma":
        return Gamma(args.rate, args.cv or 3.0)
    day_s = args.day_length or DAY_S
    peak_at_s = day_s * 14 / 24 if args.peak_at is None else args.peak_at
    return Day(args.rate, args.peak_to_trough or 4.0, peak_at_s, day_s)


def _classes(args: argparse.Namespace) -> tuple[RequestClass, ...]:
    own = args.prompt is not None or args.output is not None
    if (args.mix is not None) + (args.lengths is not None) + own > 1:
        raise InputError("--mix, --lengths and --prompt with --output exclude each other; keep one")
    prompt: Lengths = args.prompt or Uniform(100, 1500)
    output: Lengths = args.output or Exponential(200.0)
    classes: tuple[RequestClass, ...] = (RequestClass(1.0, prompt, output),)
    if args.mix is not None:
        classes = named_mix(args.mix)
    elif args.lengths is not None:
        classes = (RequestClass(1.0, prompt, output, pairs=load_lengths(args.lengths)),)
    if args.long is not None:
        share, rare = args.long
        # Long prompts answer as the others do; drawn pairs have no output of their own to lend.
        classes = with_rare_class(RequestClass(share, rare, classes[0].output), classes)
    return tuple(RequestClass(c.share, c.prompt, c.output, c.tenant, args.cached, c.pairs) for c in classes)


def _print_summary(traffic: Traffic, span_s: float, as_json: bool) -> None:
    # As reports do, so that the same file has the same figures there.
    prompt = [int(v) for v in np.quantile(traffic.prompt_tokens, [0.5, 0.99], method="inverted_cdf")]
    output = [int(v) for v in np.quantile(traffic.output_tokens, [0.5, 0.99], method="inverted_cdf")]
    summary = {
        "file": traffic.name,
        "requests": len(traffic),
        "span_s": span_s,
        "rate_rps": len(traffic) / span_s,
        "prompt_p50_tokens": prompt[0],
        "prompt_p99_tokens": prompt[1],
        "output_p50_tokens": output[0],
        "output_p99_tokens": output[1],
    }
    if as_json:
        json.dump(summary, sys.stdout)
        sys.stdout.write("\n")
        return
    print(
        f"wrote {traffic.name}: {len(traffic):,} requests in {span_s:g} s ({len(traffic) / span_s:.3g} per second), "
        f"prompt p50 {prompt[0]:,} p99 {prompt[1]:,} tokens, output p50 {output[0]:,} p99 {output[1]:,} tokens"
    )


COMMAND = Command("generate", "make traffic: arrivals of a shape, lengths of a mix", add_arguments, run)

"""``rooftune generate``: made traffic, written as a general traffic file."""

import argparse
import json
import sys

import numpy as np

from rooftune.policies.commands import Command
from rooftune.policies.errors import InputError
from rooftune.tuner.cli.flags.values import (
    flag_of,
    parse_count,
    parse_duration,
    parse_lengths,
    parse_number,
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
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EXAMPLE
    arrivals = parser.add_argument_group("arrivals")
    arrivals.add_argument("--shape", default="poisson", help="poisson (default), gamma (bursts) or day (a daily wave)")
    arrivals.add_argument("--rate", required=True, metavar="RPS", help="requests per second, on average")
    arrivals.add_argument("--span", required=True, metavar="TIME", help="how long, e.g. 600s, 10m, 1d")
    arrivals.add_argument("--cv", metavar="X", help="gamma: standard deviation over mean of the gaps (default 3)")
    arrivals.add_argument("--peak-to-trough", metavar="X", help="day: busiest rate over quietest (default 4)")
    arrivals.add_argument("--peak-at", metavar="TIME", help="day: when the peak comes (default 14h of 24)")
    arrivals.add_argument("--day-length", metavar="TIME", help="day: how long a day lasts (default 24h)")
    lengths = parser.add_argument_group("lengths, one of --mix, --lengths, or --prompt with --output")
    lengths.add_argument("--mix", metavar="NAME", help=f"a named mix: {', '.join(NAMED_MIXES)}")
    lengths.add_argument("--lengths", metavar="FILE", help="CSV of prompt and output lengths to draw pairs from")
    lengths.add_argument("--prompt", metavar="LENGTHS", help="prompt tokens (default 100-1500)")
    lengths.add_argument("--output", metavar="LENGTHS", help="output tokens (default exp:200)")
    lengths.add_argument("--long", metavar="SHARE:LENGTHS", help="rare long prompts, e.g. 1/30:60000-100000")
    lengths.add_argument("--cached", metavar="SHARE", help="share of each prompt in the prefix cache (default 0)")
    parser.add_argument("--seed", default="0", metavar="N", help="same seed, same traffic (default 0)")
    parser.add_argument("--out", required=True, metavar="FILE", help="the traffic file to write (CSV)")
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Write the file and print what is in it. Raises InputError; a failed run leaves no file behind."""
    seed = parse_count(args.seed, "--seed", low=0, high=MAX_SEED)
    span_s = parse_duration(args.span, "--span")
    traffic = generate(_arrivals(args), _classes(args), span_s, seed, name=shown_path(args.out))
    write_traffic(args.out, traffic)
    _print_summary(traffic, span_s, args.json)
    return 0


def _arrivals(args: argparse.Namespace) -> Arrivals:
    owner = {"cv": "gamma", "peak_to_trough": "day", "peak_at": "day", "day_length": "day"}
    for flag, shape in owner.items():
        if getattr(args, flag) is not None and args.shape != shape:
            raise InputError(f"{flag_of(flag)} belongs to --shape {shape}, not {args.shape!r}; drop it")
    rate_rps = parse_rate(args.rate)
    if args.shape == "poisson":
        return Poisson(rate_rps)
    if args.shape == "gamma":
        return Gamma(rate_rps, parse_positive(args.cv or "3", "--cv"))
    if args.shape == "day":
        day_s = parse_duration(args.day_length, "--day-length") if args.day_length is not None else DAY_S
        peak_at_s = day_s * 14 / 24
        if args.peak_at is not None:
            peak_at_s = parse_duration(args.peak_at, "--peak-at", zero=True)
        ratio = parse_number(args.peak_to_trough or "4", "--peak-to-trough", low=1.0, high=1000.0)
        return Day(rate_rps, ratio, peak_at_s, day_s)
    raise InputError(f"--shape is {args.shape!r}, must be one of poisson, gamma, day; choose one")


def _classes(args: argparse.Namespace) -> tuple[RequestClass, ...]:
    own = args.prompt is not None or args.output is not None
    if (args.mix is not None) + (args.lengths is not None) + own > 1:
        raise InputError("--mix, --lengths and --prompt with --output exclude each other; keep one")
    prompt: Lengths = Uniform(100, 1500) if args.prompt is None else parse_lengths(args.prompt, "--prompt")
    output: Lengths = Exponential(200.0) if args.output is None else parse_lengths(args.output, "--output")
    cached = 0.0 if args.cached is None else parse_share(args.cached, "--cached")
    classes: tuple[RequestClass, ...] = (RequestClass(1.0, prompt, output),)
    if args.mix is not None:
        classes = named_mix(args.mix)
    elif args.lengths is not None:
        classes = (RequestClass(1.0, prompt, output, pairs=load_lengths(args.lengths)),)
    if args.long is not None:
        share, colon, lengths = args.long.partition(":")
        if not colon:
            raise InputError(f"--long is {args.long!r}, must be SHARE:LENGTHS; write 1/30:60000-100000")
        rare_share = parse_share(share, "share of --long", ends=False)
        # Long prompts answer as the others do; drawn pairs have no output of their own to lend.
        rare = RequestClass(rare_share, parse_lengths(lengths, "--long"), classes[0].output)
        classes = with_rare_class(rare, classes)
    return tuple(RequestClass(c.share, c.prompt, c.output, c.tenant, cached, c.pairs) for c in classes)


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

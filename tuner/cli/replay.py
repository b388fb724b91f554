"""``rooftune replay``: send traffic to a real server and judge what its users would see."""

import argparse
import asyncio
import secrets
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version

from rooftune.policies.commands import Command, exit_code_of
from rooftune.policies.errors import InputError, RefusedError, RooftuneError, UnreachableError
from rooftune.policies.slo import Slo
from rooftune.tuner.cli.flags.target import add_target_flags, read_slo
from rooftune.tuner.cli.flags.traffic import add_traffic_flags, read_traffic
from rooftune.tuner.cli.flags.values import (
    add_value,
    flag_of,
    parse_choice,
    parse_count,
    parse_duration,
    parse_positive,
    parse_rate,
    parse_url,
)
from rooftune.tuner.cli.output import check_out_file, progress_to_stderr
from rooftune.tuner.files import read_text, shown_path
from rooftune.tuner.record import MarginPart, Seconds
from rooftune.tuner.replay.outcomes import client_outcomes, engine_outcomes, verdict
from rooftune.tuner.replay.prompts import MAX_VOCAB_TOKENS, MIN_VOCAB_TOKENS, PRESETS, preset_traffic, scale_lengths
from rooftune.tuner.replay.result_file import SCHEMA, VERSION, ReplayResult, VerdictPart, summary_line, write_result
from rooftune.tuner.replay.session import Job, Measured, client_part, replay
from rooftune.tuner.report import words
from rooftune.tuner.report.build import target_parts, traffic_part
from rooftune.tuner.report.tables import Table
from rooftune.tuner.traffic.generate import MAX_SEED
from rooftune.tuner.traffic.reshape import scale_rate
from rooftune.tuner.traffic.workload import Traffic

_SIDES = {"client": "client saw", "engine": "engine says"}


def replay_text(result: ReplayResult) -> str:
    """All of it, ending in a line break."""
    traffic = result.traffic
    head = (
        f"{words.named(traffic)}: {words.count(traffic.requests)} requests in {words.seconds(traffic.span_s)}, "
        f"to {result.model} at {result.url}"
    )
    return "\n".join([head, "", _table(result).text(), *(f"\n{note}" for note in _notes(result))]) + "\n"


def _table(result: ReplayResult) -> Table:
    rows: list[tuple[str, Callable[[VerdictPart], str]]] = [
        ("requests counted", lambda side: words.count(side.judged)),
        ("failed", lambda side: words.count(side.failed)),
    ]
    if result.targets:
        rows += [
            ("requests that meet every target", lambda side: words.share(side.attainment)),
            ("goodput", lambda side: words.per_second(side.goodput_rps, "requests")),
        ]
    rows += [
        ("output tokens of finished requests", lambda side: words.per_second(side.tokens_per_s, "tokens")),
        ("TTFT p50", lambda side: words.seconds(side.ttft_p50_s)),
        ("TTFT p95", lambda side: words.seconds(side.ttft_p95_s)),
        ("TTFT p99", lambda side: words.seconds(side.ttft_p99_s)),
        ("gap p50", lambda side: _gap(side, side.gap_p50_s)),
        ("gap p99", lambda side: _gap(side, side.gap_p99_s)),
        ("longest gap p99", lambda side: words.seconds(side.longest_gap_p99_s)),
        ("TPOT p95", lambda side: words.seconds(side.tpot_p95_s)),
    ]
    cells = [(name, *(of(side) for side in result.verdicts)) for name, of in rows]
    for index, target in enumerate(result.targets):
        cells.append((words.target(target), *(_margin(side, index) for side in result.verdicts)))
    header = ("", *(_SIDES[side.side] for side in result.verdicts))
    return Table("replay", header, tuple(cells), numeric=tuple(range(1, len(header))))


def _gap(side: VerdictPart, value: Seconds) -> str:
    """The engine counts gaps above bounds and keeps no distribution."""
    return "not told" if side.side == "engine" else words.seconds(value)


def _margin(side: VerdictPart, index: int) -> str:
    part: MarginPart | None = side.margins[index] if index < len(side.margins) else None
    return "not judged" if part is None else words.judged(part)


def _notes(result: ReplayResult) -> list[str]:
    """What a reader must know before believing the table, the gravest first."""
    client, notes = result.client, []
    if result.interrupted:
        notes.append(
            f"interrupted: {words.count(result.unsent)} requests were not sent, "
            f"{words.count(result.failures.get('interrupted', 0))} cut off; neither is counted"
        )
    failed = {name: count for name, count in result.failures.items() if name != "interrupted"}
    if failed:
        notes.append("failed: " + ", ".join(f"{name} x {count:,}" for name, count in failed.items()))
    if client.bottleneck:
        engine = "believe the engine's times" if result.engine else "ask the engine (--tuning-url), or use more cores"
        notes.append(f"this client was the bottleneck: {'; '.join(client.bottleneck)}; {engine}")
    notes.append(f"sent late by p50 {words.seconds(client.late_p50_s)}, p99 {words.seconds(client.late_p99_s)}")
    if client.short_answers:
        notes.append(f"{client.short_answers:,} answers were shorter than asked for: the server ignores ignore_eos")
    if client.events_of_many:
        notes.append(f"{client.events_of_many:,} answers held several tokens in one event: gaps are between events")
    if result.engine is not None and result.engine.missing:
        notes.append(f"the engine told nothing of {result.engine.missing:,} finished requests: not counted on its side")
    if result.engine_error is not None:
        notes.append(f"no times from the engine: {result.engine_error}")
    notes += [f"targets not judged for the {one.side}: {one.not_judged}" for one in result.verdicts if one.not_judged]
    return notes


_FILE_ONLY = ("window", "burst", "sort", "format")
_EXAMPLE = """examples:
  rooftune replay --traffic trace.csv --url http://127.0.0.1:8000 --ttft-p99 2s --gap-p99 50ms --out result.json
  rooftune replay --preset peak-ratio --rate 2 --span 2m --length-scale 0.05 --url http://127.0.0.1:8000 \\
    --tuning-url http://127.0.0.1:9000 --gap-p99 50ms

Every request is sent at its time, however slow the answers are, with exactly its tokens: prompts are token ids,
requests set max_tokens and ignore_eos. Two runs with one --seed send the same prompts, so the second
finds them in a prefix cache; without --seed every run sends new ones."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``replay``."""
    parser.epilog = _EXAMPLE
    server = parser.add_argument_group("server")
    address = partial(parse_url, sockets=False)
    add_value(server, "--url", address, "URL", "OpenAI-compatible server, http://HOST:PORT", required=True)
    server.add_argument("--model", metavar="NAME", help="model to ask for (default: the first that it lists)")
    server.add_argument("--api-key-file", metavar="FILE", help="file with the server's API key")
    tuning_url = "where its tuning protocol answers: the engine's own times"
    add_value(server, "--tuning-url", address, "URL", tuning_url)
    server.add_argument(
        "--tuning-token-file", metavar="FILE", help="tuning token; without --tuning-url, for the routes at --url"
    )
    vocab = partial(parse_count, low=MIN_VOCAB_TOKENS, high=MAX_VOCAB_TOKENS)
    add_value(server, "--vocab", vocab, "N", "upper bound of token ids (default: the server's, or 1000)")
    timeout = "a request fails after this time (default 10m)"
    add_value(server, "--timeout", parse_duration, "TIME", timeout, default=600.0)
    add_traffic_flags(parser, needed=False)
    made = parser.add_argument_group("or made traffic")
    seed = partial(parse_count, low=0, high=MAX_SEED)
    add_value(made, "--preset", partial(parse_choice, known=PRESETS), "NAME", ", ".join(PRESETS))
    add_value(made, "--rate", parse_rate, "RPS", "preset: requests per second (default 1)")
    add_value(made, "--span", parse_duration, "TIME", "preset: how long (default 60s)")
    add_value(made, "--preset-seed", seed, "N", "preset: same seed, same arrivals and lengths (default 0)")
    add_value(made, "--length-scale", parse_positive, "X", "all lengths times X, for a small model (default 1)")
    add_target_flags(parser)
    add_value(parser, "--seed", seed, "N", "seed of the prompts' content (default: new each run)")
    parser.add_argument("--out", metavar="FILE", help="write every request, gap and figure to it (JSON)")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object and nothing else")
    parser.add_argument("--quiet", action="store_true", help="no progress")


def run(args: argparse.Namespace) -> int:
    """Replay, write, print. 0: measured, whether or not the targets are met; 130 or 143: stopped by a signal, with what
    there was."""
    slo = read_slo(args, needed=False)
    if args.out is not None:
        check_out_file(args.out)
    seed = secrets.randbits(48) if args.seed is None else args.seed
    job, changes = _job(args, seed)
    with progress_to_stderr(args.quiet) as progress:
        total = len(job.traffic)
        measured = asyncio.run(replay(job, lambda done: progress("answered", done, total), progress.say))
    result = _result(job, changes, measured, slo)
    if args.out is not None:
        write_result(args.out, result)
    sys.stdout.write(summary_line(result) if args.json else replay_text(result))
    if args.out is not None and not args.json:
        print(f"\nwrote {shown_path(args.out)}")
    if measured.stop is not None:
        return exit_code_of(measured.stop)
    _refuse_nothing_finished(result)
    return 0


def _job(args: argparse.Namespace, seed: int) -> tuple[Job, tuple[str, ...]]:
    tuning_url = args.tuning_url
    if tuning_url is None and args.tuning_token_file is not None:
        tuning_url = args.url
    api_key = _secret(args.api_key_file, "--api-key-file")
    token = _secret(args.tuning_token_file, "--tuning-token-file")
    traffic, changes = _traffic(args)
    if args.length_scale is not None:
        traffic = scale_lengths(traffic, args.length_scale)
        changes = (*changes, f"lengths times {args.length_scale:g}")
    job = Job(traffic, args.url, seed, args.timeout, args.model, api_key, args.vocab, tuning_url, token)
    return job, changes


def _traffic(args: argparse.Namespace) -> tuple[Traffic, tuple[str, ...]]:
    if (args.traffic is None) == (args.preset is None):
        raise InputError("give the traffic with --traffic FILE or with --preset NAME, one of the two")
    owned, owner = (("rate", "span", "preset_seed"), "--preset") if args.preset is None else (_FILE_ONLY, "--traffic")
    for name in owned:
        value = getattr(args, name)
        if value is not None and value is not False and value != "auto":
            raise InputError(f"{flag_of(name)} belongs to {owner}; drop it")
    if args.preset is None:
        return read_traffic(args)
    made = preset_traffic(args.preset, args.rate or 1.0, args.span or 60.0, args.preset_seed or 0)
    changes = () if args.rate_scale == 1.0 else (f"arrivals {args.rate_scale:g} times as fast",)
    return replace(scale_rate(made, args.rate_scale), name=made.name), changes


def _secret(path: str | None, flag: str) -> str | None:
    """The first line of the file that holds anything."""
    if path is None:
        return None
    first = read_text(path, f"the secret of {flag} in one line").split("\n")
    found = next((line.strip() for line in first if line.strip()), "")
    if not (found.isascii() and found.isprintable() and len(found) <= 4096):
        raise InputError(f"{flag} {shown_path(path)} must hold one line of plain characters; correct the file")
    return found


def _result(job: Job, changes: tuple[str, ...], measured: Measured, slo: Slo) -> ReplayResult:
    sides: list[VerdictPart] = [verdict(client_outcomes(measured.rows, slo.gap_bounds()), slo, "client")]
    if measured.engine is not None:
        sides.append(verdict(engine_outcomes(measured.engine, measured.rows), slo, "engine"))
    return ReplayResult(
        schema=SCHEMA,
        version=VERSION,
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
        made_by=f"rooftune {version('rooftune')}",
        url=job.url,
        model=measured.model,
        vocab_tokens=measured.vocab_tokens,
        seed=job.seed,
        interrupted=measured.stop is not None,
        unsent=measured.unsent,
        traffic=traffic_part(job.traffic, changes),
        objective=slo.objective,
        targets=target_parts(slo),
        client=client_part(measured.rows),
        verdicts=tuple(sides),
        failures=dict(sorted(Counter(row.failure for row in measured.rows if row.failure is not None).items())),
        requests=measured.rows,
        engine=measured.engine,
        engine_error=measured.engine_error,
    )


def _refuse_nothing_finished(result: ReplayResult) -> None:
    if sum(result.failures.values()) < len(result.requests):
        return
    kinds = ", ".join(f"{name} x {count}" for name, count in result.failures.items())
    kind: type[RooftuneError] = UnreachableError if set(result.failures) == {"unreachable"} else RefusedError
    detail = next((row.detail for row in result.requests if row.detail), "it gave no reason")
    raise kind(f"no request was answered whole ({kinds}): {detail}")


COMMAND = Command("replay", "send traffic to a real server and judge what its users would see", add_arguments, run)

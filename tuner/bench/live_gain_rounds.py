"""The rounds of bench ``live-gain``: what is sent, when, under which setting; the processes; how figures are made."""

import math
import random
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from rooftune.policies import wire
from rooftune.policies.errors import RefusedError, UnreachableError
from rooftune.policies.quantiles import quantile
from rooftune.policies.request import Setting
from rooftune.tuner.bench.children import Children, Served, Talker, say, serve
from rooftune.tuner.observe.rows import BoolArray, FloatArray, RequestRows
from rooftune.tuner.ports.http import HttpPort
from rooftune.tuner.traffic.file import write_traffic
from rooftune.tuner.traffic.workload import Traffic

SERVED_NAME = "bench"
# A first list, to find the engine's greatest rate with.
FIRST_RPS = 4.0
LONG_EVERY = 8
DRAWS = 2000


@dataclass(frozen=True)
class Sizes:
    """Tokens: bounds of short prompts, of long ones, of answers."""

    short: tuple[int, int]
    long: tuple[int, int]
    answer: tuple[int, int]


def listed(sizes: Sizes, rate_rps: float, span_s: float, seed: int) -> Traffic:
    """A fixed list: Poisson arrivals at exactly this mean rate, every eighth prompt long and at least two of them."""
    chance = random.Random(seed)
    n = max(round(rate_rps * span_s), 2 * LONG_EVERY)
    gaps_s = np.array([chance.expovariate(1.0) for _ in range(n)])
    arrival_s = np.cumsum(gaps_s) * (n / rate_rps / float(gaps_s.sum()))
    long = np.arange(n) % LONG_EVERY == LONG_EVERY - 1
    prompts = [chance.randint(*(sizes.long if one else sizes.short)) for one in long]
    outputs = [chance.randint(*sizes.answer) for _ in range(n)]
    none = np.zeros(n, dtype=np.int64)
    return Traffic(arrival_s - arrival_s[0], np.array(prompts), np.array(outputs), cached_tokens=none, tenant=none)


def at_once(requests: Traffic) -> Traffic:
    """The same requests, all at the start."""
    return replace(requests, arrival_s=np.zeros(len(requests)))


@dataclass(frozen=True)
class Round:
    """The list served once, in the order of the list; seconds, instants on the engine's clock, NaN: not finished."""

    arrival_s: FloatArray
    finish_s: FloatArray
    ttft_s: FloatArray
    longest_gap_s: FloatArray

    def good(self, ttft_s: float, gap_s: float) -> BoolArray:
        """Requests within both targets; one that did not finish is not."""
        return (self.ttft_s <= ttft_s) & (self.longest_gap_s <= gap_s)


def round_of(rows: RequestRows, requests: Traffic) -> Round:
    """The rows of one round in the order of the list: by their counts of tokens, and equal ones by arrival.

    Raises RefusedError when a request of the list left no row.
    """
    order = np.argsort(rows.arrival_s, kind="stable").tolist()
    picked = []
    for at in np.argsort(requests.arrival_s, kind="stable").tolist():
        shape = (requests.prompt_tokens[at], requests.output_tokens[at])
        row = next((one for one in order if (rows.prompt_tokens[one], rows.output_tokens[one]) == shape), None)
        if row is None:
            raise RefusedError(f"request {at} of the list left no finished row at the engine")
        order.remove(row)
        picked.append((at, row))
    index = np.array([row for _, row in sorted(picked)], dtype=np.int64)
    gap_s = np.where(rows.gap_count == 0, 0.0, rows.longest_gap_s)
    return Round(rows.arrival_s[index], rows.finish_s[index], rows.ttft_s[index], gap_s[index])


# First tokens may take twice as long as nine in ten take at the default: a smaller budget costs documents some time.
TTFT_RATIO = 2.0
# A stream that meets no document is among the quarter with the shortest stalls; one that does lies high, but not in
# the last tenth, which a hiccup of the machine makes.
SPARED, STALLED = 0.25, 0.9


def bounds_between(ttft_s: FloatArray, longest_gap_s: FloatArray) -> tuple[float, float]:
    """Bounds of TTFT and longest gap, seconds, that the default misses and a good setting can keep: a stream may stall
    as long as lies halfway, in ratio, between the longest gap of those who met no document and that of those who did.
    """
    usual_s, stalled_s = (quantile(longest_gap_s, share) for share in (SPARED, STALLED))
    return TTFT_RATIO * quantile(ttft_s, 0.9), math.sqrt(usual_s * stalled_s)


def best_of(sweep: Sequence[Sequence[float]]) -> float:
    """Attainment of the best setting of a sweep: sweep[repeat][setting].

    With two repeats the best is chosen in one and valued in the other, both ways: the luckiest of many noisy numbers
    is not the best setting's.
    """
    table = np.array(sweep, dtype=np.float64)
    if len(table) == 1:
        return float(table[0].max())
    return float(np.mean([table[1 - pick, int(np.argmax(table[pick]))] for pick in (0, 1)]))


def share_of_best(sweep: Sequence[Sequence[float]], tuned: float) -> float:
    """Tuned attainment over that of the best setting of the sweep, see ``best_of``."""
    return tuned / max(best_of(sweep), 1e-9)


def ratio_interval(tuned: FloatArray, default: FloatArray) -> tuple[float, float, float]:
    """Ratio of two means over the same requests, and its 95 % interval: requests are drawn in pairs.

    tuned, default: share of the rounds in which request i was good, shape (n,).
    """
    n = len(tuned)
    picks = np.random.default_rng(0).integers(0, n, size=(DRAWS, n))
    ratios = tuned[picks].sum(axis=1) / np.maximum(default[picks].sum(axis=1), 1e-9)
    low, high = np.quantile(ratios, (0.025, 0.975))
    return float(tuned.sum() / max(default.sum(), 1e-9)), float(low), float(high)


def trial_cost(trial_rounds: Sequence[BoolArray], default: FloatArray, requests: int) -> float:
    """Share of all requests that lost their targets in rounds with a trial, against the default's paired rounds, net
    and at least 0: a trial that wins cost nothing."""
    lost = sum(max(0.0, float(default.sum() - good.sum())) for good in trial_rounds)
    return lost / requests if requests else 0.0


LEASE_S = 3600.0
# Longest wait for a client to start, and for a round to run empty.
START_S, ROUND_S = 60.0, 600.0


@dataclass
class Bed:
    """One engine under test, with the rows of ended requests that were read so far."""

    children: Children
    served: Served
    port: HttpPort
    work: Path
    after: int = -1

    def close(self) -> None:
        """End the engine."""
        self.served.child.stop()
        self.port.close()

    def client(self, requests: Traffic, name: str = "client") -> Talker:
        """A client that knows the list."""
        traffic = self.work / f"{name}.csv"
        write_traffic(traffic, requests)
        words = ["-m", "rooftune.tuner.bench.rounds_client", self.served.base, SERVED_NAME, str(traffic)]
        client = self.children.talk(name, words)
        client.hear("ready", START_S)
        return client

    def round(self, client: Talker, requests: Traffic) -> Round:
        """The list once, from an empty engine to an empty engine."""
        self._new_rows()
        client.say("go")
        client.hear("sending", START_S)
        client.hear("done", ROUND_S)
        rows = self._new_rows()
        if len(rows) < len(requests):
            raise UnreachableError(f"{len(requests)} requests were sent and {len(rows)} have left a row at the engine")
        return round_of(rows, requests)

    def _new_rows(self) -> RequestRows:
        pages = list[RequestRows]()
        while (page := self.port.requests_after(self.after)).sequence:
            self.after = page.next
            pages.append(RequestRows.from_wire(page))
        return RequestRows.join(pages) if pages else RequestRows.from_wire()

    def push(self, setting: Setting) -> None:
        """Put budget and chunk cap in force for as long as the bench takes. Raises RefusedError when refused."""
        knobs = wire.Knobs(step_tokens=setting.step_tokens, chunk_cap_tokens=setting.chunk_cap_tokens)
        revision = self.port.state().revision
        answer = self.port.push(
            wire.PushRequest(
                knobs=knobs, lease_s=LEASE_S, expected_revision=revision, actor="bench", reason="live-gain sweep"
            )
        )
        if isinstance(answer, wire.Refusal):
            raise RefusedError(f"the engine refuses {knobs}: {answer.message}")

    def shares(
        self,
        client: Talker,
        requests: Traffic,
        settings: Sequence[Setting],
        repeats: int,
        targets: tuple[float, float],
    ) -> tuple[tuple[float, ...], ...]:
        """Good share of a round under each setting, [repeat][setting]; each repeat takes them in an order of its own.

        targets: TTFT and longest gap, seconds.
        """
        found = []
        for repeat in range(repeats):
            order = list(range(len(settings)))
            random.Random(repeat).shuffle(order)
            share = dict.fromkeys(order, 0.0)
            for at in order:
                self.push(settings[at])
                share[at] = float(self.round(client, requests).good(*targets).mean())
                tokens, cap = settings[at].step_tokens, settings[at].chunk_cap_tokens
                say(f"repeat {repeat + 1} of {repeats}: budget {tokens}, chunk cap {cap}: {share[at]:.0%} good")
            found.append(tuple(share[at] for at in range(len(settings))))
        return tuple(found)

    def greatest_rps(self, sizes: Sizes, span_s: float, times: int) -> float:
        """Requests per second when all come at once, the best of some times, after a first time of everything."""
        requests = at_once(listed(sizes, FIRST_RPS, span_s, seed=1))
        client = self.client(requests, "burst")
        _, *rounds = (self.round(client, requests) for _ in range(1 + times))
        client.child.stop()
        return len(requests) / min(float(np.max(one.finish_s) - np.min(one.arrival_s)) for one in rounds)


def serve_bed(children: Children, work: Path, flags: Sequence[str], env: Mapping[str, str] | None = None) -> Bed:
    """``rooftune serve FLAGS`` with a tuning token of its own in ``work``."""
    work.mkdir(exist_ok=True)
    token = work / "token"
    token.write_text(secrets.token_hex(16))
    served = serve(children, [*flags, "--served-name", SERVED_NAME, "--tuning-token-file", str(token)], env)
    return Bed(children, served, HttpPort(served.tuning, token), work)

"""What the demo sends and asks for, from how fast this machine serves this model: so that it shows the same on a
laptop and on an accelerator. Pure.
"""

import math
import random
from dataclasses import dataclass

import httpx
import numpy as np

from rooftune.policies.errors import RefusedError, UnreachableError, bad_value
from rooftune.policies.step_time import StepModel
from rooftune.tuner.bench.children import Served
from rooftune.tuner.bench.live_gain_rounds import bounds_between
from rooftune.tuner.bench.rounds_client import IDS
from rooftune.tuner.control.cycle.fit import noise_pairs
from rooftune.tuner.observe.rows import FINISHED, RequestRows, StepRows
from rooftune.tuner.ports.http import HttpPort

DOCUMENT_EVERY = 4
# A document that takes this long to read alone visibly stalls every stream and overloads no machine.
DOCUMENT_S = 0.8
ANSWER_S = 1.0
CHAT_PROMPT_TOKENS = (24, 96)
DOCUMENT_OUTPUT_TOKENS = 8
# Answers under way at once, roughly: a decode step carries them all.
SHARED_BY = 3.0
# Of the rate at which the queue would grow.
LOAD = 0.75
# Requests from which the default's own latencies are read.
WATCH_REQUESTS = 40


@dataclass(frozen=True)
class Speed:
    """decode_s: one step of decodes; prompt_s: per prompt token beyond it. Raises InputError unless above 0."""

    decode_s: float
    prompt_s: float

    def __post_init__(self) -> None:
        for name in ("decode_s", "prompt_s"):
            if not 0.0 < getattr(self, name) < 60.0:
                raise bad_value(f"measured {name}", getattr(self, name), "above 0 s and below 60 s", "run it again")


@dataclass(frozen=True)
class Plan:
    """rate_rps: arrivals; tokens: of a document's prompt at most, of a chat's answer on average."""

    rate_rps: float
    document_tokens: int
    answer_tokens: int


def plan_of(speed: Speed, boot_tokens: int, model_tokens: int) -> Plan:
    """boot_tokens: the budget at boot; model_tokens: most tokens of a request."""
    most = min(int(0.6 * model_tokens), 8 * boot_tokens)
    document = max(min(int(DOCUMENT_S / speed.prompt_s), most), min(256, most))
    answer = max(8, min(64, int(ANSWER_S / speed.decode_s)))
    chat_s = speed.prompt_s * sum(CHAT_PROMPT_TOKENS) / 2 + answer * speed.decode_s / SHARED_BY
    document_s = speed.prompt_s * document + DOCUMENT_OUTPUT_TOKENS * speed.decode_s / SHARED_BY
    mean_s = chat_s + (document_s - chat_s) / DOCUMENT_EVERY
    return Plan(min(LOAD / mean_s, 20.0), document, answer)


@dataclass(frozen=True)
class Bounds:
    """The targets, seconds: of TTFT and of the longest gap, each for nine requests in ten."""

    ttft_s: float
    gap_s: float


def bounds_of(rows: RequestRows) -> Bounds:
    """From what requests got at the default, see ``bounds_between``. Raises RefusedError without enough of them."""
    done = rows.select((rows.ended == FINISHED) & np.isfinite(rows.ttft_s) & (rows.gap_count > 0))
    if len(done) < WATCH_REQUESTS // 2:
        raise RefusedError(
            f"only {len(done)} requests have ended while the demo watched; the machine is too busy, try again"
        )
    return Bounds(*map(_round, bounds_between(done.ttft_s, done.longest_gap_s)))


def _round(seconds: float) -> float:
    """Two digits, as a person would state a target."""
    return float(f"{seconds:.2g}")


def traffic_csv(plan: Plan, span_s: float, seed: int) -> str:
    """Poisson arrivals, every ``DOCUMENT_EVERY``-th a document: arrival_s,prompt_tokens,output_tokens."""
    chance = random.Random(seed)
    lines, at_s, number = ["arrival_s,prompt_tokens,output_tokens"], 0.0, 0
    while (at_s := at_s + chance.expovariate(plan.rate_rps)) < span_s:
        number += 1
        if number % DOCUMENT_EVERY == 0:
            prompt = int(plan.document_tokens * chance.uniform(0.7, 1.0))
            answer = DOCUMENT_OUTPUT_TOKENS
        else:
            prompt = chance.randint(*CHAT_PROMPT_TOKENS)
            answer = max(2, int(plan.answer_tokens * chance.uniform(0.6, 1.4)))
        lines.append(f"{at_s:.3f},{prompt},{answer}")
    return "\n".join(lines) + "\n"


WAIT_S = 120.0
ANSWER_TOKENS = 24
PROMPTS = (256, 1024)
# Lone prompts about where a knee may be: twice each, as the first step of a size may pay for it.
SMALL_PROMPTS = (8, 16, 32, 48, 64, 96, 128)
LEAST_SLOPE = 1e-7
MOST_HICCUP = 5.0  # times a usual decode: a first step that pays for its size is not the machine's load
PACE_BLOCK_S = 2.0  # of busy time
UNSTEADY = 1.5  # a pace that moves by more moves latencies by more than a setting does


def measure(served: Served, model: str, port: HttpPort) -> Speed:
    """A few requests, one after the other. Raises UnreachableError or RefusedError when the engine does not serve."""
    chance = random.Random(0)
    with httpx.Client(timeout=WAIT_S, trust_env=False) as http:
        small = [(tokens, 2) for tokens in 2 * SMALL_PROMPTS]
        for prompt, answer in ((16, 4), (32, ANSWER_TOKENS), *small, *((tokens, 2) for tokens in 3 * PROMPTS)):
            tokens = [chance.randrange(*IDS) for _ in range(prompt)]
            _ask(http, served.base, model, tokens, answer)
    return speed_of(StepRows.from_wire(port.steps_after(-1)))


def speed_of(steps: StepRows) -> Speed:
    """From steps of lone requests: the usual decode, and what the longest prompt took beyond the next shorter one.

    Means where they lie above the median: other work on the machine takes its share of the load's time as well. The
    first prompt of a size pays for it.
    """
    decodes = steps.duration_s[(steps.prefill_tokens == 0) & (steps.decode_tokens > 0)]
    took_s = {tokens: steps.duration_s[steps.prefill_tokens == tokens] for tokens in PROMPTS}
    if not len(decodes) or not all(len(found) for found in took_s.values()):
        raise RefusedError(
            "the engine did not run the demo's probes as whole prompts; start it with its default budget"
        )
    short, long = PROMPTS
    slope = float(took_s[long][-2:].mean() - took_s[short][-2:].mean()) / (long - short)
    usual_s = float(np.median(decodes))
    return Speed(max(usual_s, float(np.minimum(decodes, MOST_HICCUP * usual_s).mean())), max(slope, LEAST_SLOPE))


def unsteadiness(steps: StepRows, model: StepModel) -> float:
    """How far the machine's pace moved: measured over modelled step time in blocks of ``PACE_BLOCK_S``, the second
    highest over the second lowest. NaN with fewer than ten blocks."""
    modelled, measured = (np.array(values) for values in noise_pairs(model, steps, most=max(len(steps), 1)))
    if not len(modelled):
        return math.nan
    edges = np.flatnonzero(np.diff(np.floor(np.cumsum(measured) / PACE_BLOCK_S))) + 1
    paces = [
        np.sum(took) / np.sum(said)
        for took, said in zip(np.split(measured, edges), np.split(modelled, edges), strict=True)
    ][:-1]
    if len(paces) < 10:
        return math.nan
    return float(np.sort(paces)[-2] / np.sort(paces)[1])


def first_model(served: Served) -> tuple[str, int]:
    """Name and most tokens of a request. Raises UnreachableError when the server does not say what it serves."""
    with httpx.Client(timeout=WAIT_S, trust_env=False) as http:
        try:
            entry = http.get(f"{served.base}/v1/models").json()["data"][0]
            return str(entry["id"]), int(entry["max_model_len"])
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            raise UnreachableError(f"{served.base} does not say what it serves: {error}") from None


def _ask(http: httpx.Client, base: str, model: str, prompt: list[int], answer: int) -> None:
    body = {"model": model, "prompt": prompt, "max_tokens": answer, "ignore_eos": True, "temperature": 0.0}
    try:
        reply = http.post(f"{base}/v1/completions", json=body)
    except httpx.HTTPError as error:
        raise UnreachableError(f"{base} does not answer: {error or type(error).__name__}") from None
    if reply.status_code != 200:
        raise RefusedError(f"{base} answers {reply.status_code}: {reply.text[:200]}")

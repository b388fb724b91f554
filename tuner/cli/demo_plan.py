"""What the demo sends and asks for, from how fast this machine serves this model: so that it shows the same on a
laptop and on an accelerator. Pure."""

import math
import random
from dataclasses import dataclass

import numpy as np
from rooftune.policies.errors import RefusedError, bad_value
from rooftune.policies.quantiles import quantile
from rooftune.tuner.observe.rows import FINISHED, RequestRows

DOCUMENT_EVERY = 4
# A document that takes this long to read alone stalls everybody visibly, and no machine chokes on it.
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
# First tokens may take twice as long as nine in ten take at the default: a smaller budget costs documents some time.
TTFT_RATIO = 2.0
# A stream that meets no document is among the quarter with the shortest stalls; one that does lies high, but not in
# the last tenth, which a hiccup of the machine makes.
SPARED, STALLED = 0.25, 0.9


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
    """From what requests got at the default. A stream may stall as long as lies halfway, in ratio, between the longest
    gap of those who met no document and that of those who did. Raises RefusedError without enough of them."""
    done = rows.select((rows.ended == FINISHED) & np.isfinite(rows.ttft_s) & (rows.gap_count > 0))
    if len(done) < WATCH_REQUESTS // 2:
        raise RefusedError(
            f"only {len(done)} requests have ended while the demo watched; the machine is too busy, try again"
        )
    usual_s, stalled_s = (quantile(done.longest_gap_s, share) for share in (SPARED, STALLED))
    return Bounds(_round(TTFT_RATIO * quantile(done.ttft_s, 0.9)), _round(math.sqrt(usual_s * stalled_s)))


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

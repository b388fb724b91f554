"""What the demo sends and asks for, from how fast this machine serves this model: so that it shows the same on a
laptop and on an accelerator. Pure."""

import random
from dataclasses import dataclass

from policies.errors import bad_value

DOCUMENT_EVERY = 8
# A document that takes this long to read alone stalls everybody visibly, and no machine chokes on it.
DOCUMENT_S = 1.2
ANSWER_S = 1.0
CHAT_PROMPT_TOKENS = (24, 96)
DOCUMENT_OUTPUT_TOKENS = 8
# Answers under way at once, roughly: a decode step carries them all.
SHARED_BY = 3.0
# Of the rate at which the queue would grow.
LOAD = 0.7
# Nobody's stream may stall for longer than a third of what the boot budget makes of a document, nor is anybody asked
# for less than three decode steps: single ones are late on any machine.
GAP_SHARE = 0.33
GAP_STEPS = 3.0
TTFT_DOCUMENTS = 3.0


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
    """rate_rps: arrivals; tokens: of a document's prompt, of a chat's answer; ttft_s, gap_s: bounds of the targets."""

    rate_rps: float
    document_tokens: int
    answer_tokens: int
    ttft_s: float
    gap_s: float


def plan_of(speed: Speed, boot_tokens: int, model_tokens: int) -> Plan:
    """boot_tokens: the budget at boot; model_tokens: most tokens of a request."""
    most = min(int(0.6 * model_tokens), 8 * boot_tokens)
    document = max(min(int(DOCUMENT_S / speed.prompt_s), most), min(256, most))
    answer = max(8, min(64, int(ANSWER_S / speed.decode_s)))
    stall_s = speed.decode_s + speed.prompt_s * min(document, boot_tokens)
    chat_s = speed.prompt_s * sum(CHAT_PROMPT_TOKENS) / 2 + answer * speed.decode_s / SHARED_BY
    document_s = speed.prompt_s * document + DOCUMENT_OUTPUT_TOKENS * speed.decode_s / SHARED_BY
    mean_s = chat_s + (document_s - chat_s) / DOCUMENT_EVERY
    return Plan(
        rate_rps=min(LOAD / mean_s, 20.0),
        document_tokens=document,
        answer_tokens=answer,
        ttft_s=_round(max(TTFT_DOCUMENTS * speed.prompt_s * document, 10.0 * speed.decode_s)),
        gap_s=_round(max(GAP_SHARE * stall_s, GAP_STEPS * speed.decode_s)),
    )


def _round(seconds: float) -> float:
    """Two digits, as a person would state a target."""
    return float(f"{seconds:.2g}")


def traffic_csv(plan: Plan, span_s: float, seed: int) -> str:
    """Poisson arrivals, every eighth a document: arrival_s,prompt_tokens,output_tokens."""
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

"""How fast an engine serves: a few requests to it alone, read from its own step records."""

import random
from dataclasses import dataclass

import httpx
import numpy as np
from rooftune.policies.errors import RefusedError, UnreachableError
from rooftune.tuner.bench.children import Served
from rooftune.tuner.cli.demo_plan import Speed
from rooftune.tuner.observe.rows import StepRows
from rooftune.tuner.ports.http import HttpPort

WAIT_S = 120.0
ANSWER_TOKENS = 24
PROMPTS = (256, 1024)
# Lone prompts about where a knee may be: twice each, as the first step of a size may pay for it.
SMALL_PROMPTS = (8, 16, 32, 48, 64, 96, 128)
# Token ids of prompts that every vocabulary has, above the special ones of most.
IDS = (10, 250)
LEAST_SLOPE = 1e-7


@dataclass(frozen=True)
class Model:
    """What is served: its name, and the most tokens of a request."""

    name: str
    max_tokens: int


def measure(served: Served, model: Model, port: HttpPort) -> Speed:
    """A few requests, one after the other. Raises UnreachableError or RefusedError when the engine does not serve."""
    chance = random.Random(0)
    with httpx.Client(timeout=WAIT_S, trust_env=False) as http:
        small = [(tokens, 2) for tokens in 2 * SMALL_PROMPTS]
        for prompt, answer in ((16, 4), (32, ANSWER_TOKENS), *small, *((tokens, 2) for tokens in PROMPTS)):
            tokens = [chance.randrange(*IDS) for _ in range(prompt)]
            _ask(http, served.base, model.name, tokens, answer)
    return speed_of(StepRows.from_wire(port.steps_after(-1)))


def speed_of(steps: StepRows) -> Speed:
    """From steps of lone requests: the median decode, and what the longest prompt took beyond the next shorter one."""
    decodes = steps.duration_s[(steps.prefill_tokens == 0) & (steps.decode_tokens > 0)]
    took_s = {tokens: steps.duration_s[steps.prefill_tokens == tokens] for tokens in PROMPTS}
    if not len(decodes) or not all(len(found) for found in took_s.values()):
        raise RefusedError(
            "the engine did not run the demo's probes as whole prompts; start it with its default budget"
        )
    short, long = PROMPTS
    slope = float(took_s[long][-1] - took_s[short][-1]) / (long - short)
    return Speed(float(np.median(decodes)), max(slope, LEAST_SLOPE))


def first_model(served: Served) -> Model:
    """Raises UnreachableError when the server does not say what it serves."""
    with httpx.Client(timeout=WAIT_S, trust_env=False) as http:
        try:
            entry = http.get(f"{served.base}/v1/models").json()["data"][0]
            return Model(str(entry["id"]), int(entry["max_model_len"]))
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            raise UnreachableError(f"{served.base} does not say what it serves: {error}") from None


def _ask(http: httpx.Client, base: str, model: str, prompt: list[int], answer: int) -> None:
    body = {"model": model, "prompt": prompt, "max_tokens": answer, "ignore_eos": True, "temperature": 0.0}
    try:
        said = http.post(f"{base}/v1/completions", json=body)
    except httpx.HTTPError as error:
        raise UnreachableError(f"{base} does not answer: {error or type(error).__name__}") from None
    if said.status_code != 200:
        raise RefusedError(f"{base} answers {said.status_code}: {said.text[:200]}")

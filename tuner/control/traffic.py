"""What makes two windows of traffic alike. Pure."""

import math

from rooftune.policies.quantiles import quantile
from rooftune.tuner.control.memory import Traffic
from rooftune.tuner.observe.rows import RequestRows


def traffic_of(requests: RequestRows, span_s: float) -> Traffic | None:
    """Rate and lengths; None for fewer than ten requests."""
    if len(requests) < 10 or span_s <= 0.0:
        return None
    prompts, outputs = requests.prompt_tokens, requests.output_tokens
    mean = float(prompts.mean())
    return Traffic(
        requests=len(requests),
        rate_rps=len(requests) / span_s,
        prompt_p50_tokens=quantile(prompts, 0.5),
        prompt_mean_tokens=mean,
        prompt_spread=float(prompts.std()) / max(mean, 1.0),
        output_p50_tokens=quantile(outputs, 0.5),
    )


def alike(one: Traffic, other: Traffic, ratio: float = 1.5) -> bool:
    """Whether two windows carried about the same traffic: every figure within ``ratio``, and beyond that what chance
    does to windows of so few requests."""
    counting = math.sqrt(1.0 / max(one.requests, 1) + 1.0 / max(other.requests, 1))
    spread = max(one.prompt_spread, other.prompt_spread)
    pairs = (
        (one.rate_rps, other.rate_rps, counting),
        (one.prompt_p50_tokens, other.prompt_p50_tokens, counting),
        (one.prompt_mean_tokens, other.prompt_mean_tokens, spread * counting),
        (one.output_p50_tokens, other.output_p50_tokens, counting),
    )
    far = [abs(math.log(max(a, 1e-9) / max(b, 1e-9))) > math.log(ratio) + 2.0 * noise for a, b, noise in pairs]
    return not any(far)

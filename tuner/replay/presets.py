"""Made traffic by name: the four classes of requests alone, and mixed as on an ordinary day and at its peak.

The shares are teaching values like the lengths (``tuner/sim/lengths.py``), not measurements: on an ordinary day most
requests are short questions; at the peak documents and long answers come several times as often.
"""

from dataclasses import replace

import numpy as np
from rooftune.policies.errors import InputError, bad_value
from rooftune.tuner.sim.generate import Poisson, generate
from rooftune.tuner.sim.lengths import RequestClass, named_mix
from rooftune.tuner.sim.workload import MAX_TOKENS_PER_REQUEST, IntArray, Traffic

CLASSES = {"short-questions": "chat", "medium-rag": "rag", "long-documents": "documents", "long-outputs": "long-output"}
REAL_SHARES = (0.70, 0.20, 0.03, 0.07)
PEAK_SHARES = (0.40, 0.25, 0.15, 0.20)
PRESETS: dict[str, tuple[float, ...]] = {
    **{name: tuple(float(name == other) for other in CLASSES) for name in CLASSES},
    "real-ratio": REAL_SHARES,
    "peak-ratio": PEAK_SHARES,
}


def preset_traffic(name: str, rate_rps: float, span_s: float, seed: int) -> Traffic:
    """Poisson arrivals of a preset; each class is a tenant of its own name. Raises InputError."""
    if name not in PRESETS:
        raise bad_value("preset", name, f"one of {', '.join(PRESETS)}", "choose one")
    classes = [
        RequestClass(share, one.prompt, one.output, tenant=tenant)
        for (tenant, mix), share in zip(CLASSES.items(), PRESETS[name], strict=True)
        if share > 0.0
        for one in named_mix(mix)
    ]
    return generate(Poisson(rate_rps), classes, span_s, seed, name=name)


def scale_lengths(traffic: Traffic, factor: float) -> Traffic:
    """Prompt, cached and output tokens times ``factor`` (at least 1), for a small model. Raises InputError."""
    if not 0.0 < factor <= 100.0:
        raise bad_value("length scale", factor, "above 0 and at most 100", "0.05 makes 2,000 tokens 100")
    if factor == 1.0:
        return traffic
    if len(traffic.prefix_offsets):
        raise InputError("traffic with prefix_keys cannot change its lengths: its spans are fixed; drop --length-scale")
    prompt, output = _scaled(traffic.prompt_tokens, factor), _scaled(traffic.output_tokens, factor)
    cached = np.minimum((traffic.cached_tokens * factor).astype(np.int64), prompt - 1)
    return replace(traffic, prompt_tokens=prompt, output_tokens=output, cached_tokens=cached)


def _scaled(tokens: IntArray, factor: float) -> IntArray:
    scaled: IntArray = np.clip(np.rint(tokens * factor), 1, MAX_TOKENS_PER_REQUEST).astype(np.int64)
    return scaled

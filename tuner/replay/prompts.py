"""Prompts as token ids: exact lengths, equal where the traffic says that contents are equal, different elsewhere."""

from dataclasses import replace

import numpy as np

from rooftune.policies.errors import InputError, bad_value
from rooftune.tuner.traffic.generate import MAX_SEED, Poisson, RequestClass, generate, named_mix
from rooftune.tuner.traffic.workload import MAX_TOKENS_PER_REQUEST, IntArray, Traffic

FIRST_TOKEN_ID = 10  # below it lie padding, begin, end and other ids with a meaning in most vocabularies
DEFAULT_VOCAB_TOKENS = 1000
MIN_VOCAB_TOKENS = 32
MAX_VOCAB_TOKENS = 2**24
# One stream of chance for each purpose, so that no prompt's own part can repeat a shared one.
_SHARED, _SPAN, _OWN = 0, 1, 2


class PromptMaker:
    """Token ids of each request of ``traffic``, within FIRST_TOKEN_ID..vocab_tokens - 1.

    With prefix keys, spans of equal keys hold equal ids. Without them ``cached_tokens`` of a prompt begin a text that
    all requests share (so they are cached from the first long enough request on). Everything else is the request's
    own. Same traffic, vocabulary and seed: same ids. Raises InputError for a vocabulary or a seed out of range.
    """

    def __init__(self, traffic: Traffic, vocab_tokens: int, seed: int) -> None:
        if not MIN_VOCAB_TOKENS <= vocab_tokens <= MAX_VOCAB_TOKENS:
            bound = f"within {MIN_VOCAB_TOKENS}..{MAX_VOCAB_TOKENS} tokens"
            raise bad_value("vocabulary", vocab_tokens, bound, "give the model's own size with --vocab")
        if not 0 <= seed <= MAX_SEED:
            raise bad_value("seed", seed, f"within 0..{MAX_SEED}", "0 is fine")
        self._traffic = traffic
        self._vocab_tokens = vocab_tokens
        self._seed = seed
        known = len(traffic.prefix_offsets) > 0
        self._shared = self._draw(_SHARED, 0, 0 if known else int(traffic.cached_tokens.max()))

    def token_ids(self, request: int) -> IntArray:
        """Ids of one prompt, shape (prompt_tokens,)."""
        length = int(self._traffic.prompt_tokens[request])
        start = self._known_start(request, length)
        return np.concatenate([start, self._draw(_OWN, request, length - len(start))])

    def _known_start(self, request: int, length: int) -> IntArray:
        offsets, span = self._traffic.prefix_offsets, self._traffic.prefix_span_tokens
        if not len(offsets):
            return self._shared[: int(self._traffic.cached_tokens[request])]
        keys = self._traffic.prefix_keys[offsets[request] : offsets[request + 1]]
        spans = [self._draw(_SPAN, int(key), span) for key in keys]
        none = np.zeros(0, dtype=np.int64)
        return np.concatenate([none, *spans])[:length]

    def _draw(self, purpose: int, which: int, length: int) -> IntArray:
        rng = np.random.default_rng((self._seed, purpose, which))
        return rng.integers(FIRST_TOKEN_ID, self._vocab_tokens, size=length, dtype=np.int64)


CLASSES = {"short-questions": "chat", "medium-rag": "rag", "long-documents": "documents", "long-outputs": "long-output"}
PRESETS: dict[str, tuple[float, ...]] = {
    **{name: tuple(float(name == other) for other in CLASSES) for name in CLASSES},
    "real-ratio": (0.70, 0.20, 0.03, 0.07),
    "peak-ratio": (0.40, 0.25, 0.15, 0.20),
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

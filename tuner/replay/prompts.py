"""Prompts as token ids: exact lengths, equal where the traffic says that contents are equal, different elsewhere."""

import numpy as np
from rooftune.policies.errors import bad_value
from rooftune.tuner.sim.generate import MAX_SEED
from rooftune.tuner.sim.workload import IntArray, Traffic

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

"""Computes one step of our scheduler with a transformers model: their forward, our KV blocks."""

import torch
from transformers import PreTrainedModel

from engine.step import ModelFacts, StepBatch
from engine.torch.attention import STEP_ARGUMENT
from engine.torch.geometry import StepGeometry
from engine.torch.kv_store import KvStore
from engine.torch.masks import CausalMasks
from engine.torch.sampling import sample


class TorchRunner:
    """A Runner (see ``engine.step``) over a causal language model that was set to our attention.

    Make it with ``engine.torch.load``. Not safe for two threads at once: the KV store is one.
    """

    def __init__(self, model: PreTrainedModel, store: KvStore, facts: ModelFacts) -> None:
        self._facts = facts
        self._store = store
        self._masks = CausalMasks(store.dtype, store.device)
        self._inner = model.base_model
        self._head = model.get_output_embeddings()

    @property
    def facts(self) -> ModelFacts:
        """What it runs, and how many KV blocks it has."""
        return self._facts

    @torch.inference_mode()
    def run(self, step: StepBatch) -> list[int]:
        """The new token ids, one for each segment with ``sample``, in the order of the segments.

        Raises ValueError for a segment that does not fit its block table or the store.
        """
        geometry = StepGeometry(step, self._store, self._masks)
        hidden = self._inner(
            input_ids=geometry.token_ids,
            position_ids=geometry.positions,
            use_cache=False,
            **{STEP_ARGUMENT: geometry},
        ).last_hidden_state[0]
        sampled = [segment for segment in step.segments if segment.sample]
        if not sampled:
            if self._store.device.type == "cuda":
                torch.cuda.synchronize(self._store.device)  # or the step's duration would be booked in the next
            return []
        # Only these rows go through the vocabulary: for a small model it is the dearest matrix of all.
        logits = self._head(hidden.index_select(0, geometry.last_rows))
        return sample(logits, [segment.sampling for segment in sampled], [segment.end for segment in sampled])

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
        self._windows: tuple[int, ...] = ()  # of the layers, known after the first step
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
        geometry = self.prepare(step)
        logits = self.forward(geometry)
        if logits is None:
            if self._store.device.type == "cuda":
                torch.cuda.synchronize(self._store.device)  # or the step's duration would be booked in the next
            return []
        sampled = [segment for segment in step.segments if segment.sample]
        return sample(logits, [segment.sampling for segment in sampled], [segment.end for segment in sampled])

    def prepare(self, step: StepBatch) -> StepGeometry:
        """Everything that ``forward`` will ask for, and no stale entry where it will look; in inference mode."""
        geometry = StepGeometry(step, self._store, self._masks)
        for window in self._windows:
            geometry.reads(window)
        self._store.clear(geometry.unwritten)
        return geometry

    def forward(self, geometry: StepGeometry) -> torch.Tensor | None:
        """The model's own work: logits of the rows that are wanted; None when none is."""
        hidden = self._inner(
            input_ids=geometry.token_ids,
            position_ids=geometry.positions,
            use_cache=False,
            **{STEP_ARGUMENT: geometry},
        ).last_hidden_state[0]
        self._windows = geometry.windows
        if len(geometry.last_rows) == 0:
            return None
        # Only these rows go through the vocabulary: for a small model it is the dearest matrix of all.
        logits: torch.Tensor = self._head(hidden.index_select(0, geometry.last_rows))
        return logits

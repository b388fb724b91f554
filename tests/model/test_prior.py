"""The hardware prior reproduces the textbook numbers."""

import math

import pytest

from rooftune.policies.errors import InputError
from rooftune.policies.step_time import knee_tokens
from rooftune.tuner.model.prior import CARDS, card_prior, prior_sd, roofline_prior


def test_the_textbook_model_has_a_floor_of_8_ms_and_a_knee_of_200() -> None:
    model = roofline_prior(8e9, 2.0, 2e12, 400e12)
    assert model.floor_s == pytest.approx(0.008)
    assert model.slope_s_per_token == pytest.approx(4e-5)
    assert knee_tokens(model) == pytest.approx(200.0)


def test_two_cards_halve_floor_and_slope() -> None:
    one, two = card_prior("h100-sxm", 8e9, "bf16"), card_prior("h100-sxm", 8e9, "bf16", cards=2)
    assert two.floor_s == pytest.approx(one.floor_s / 2) and two.slope_s_per_token == pytest.approx(
        one.slope_s_per_token / 2
    )


def test_every_card_gives_a_plausible_knee() -> None:
    for name in CARDS:
        assert 50.0 < knee_tokens(card_prior(name, 8e9, "fp16")) < 1000.0, name


def test_impossible_card_values_are_refused() -> None:
    with pytest.raises(InputError, match="a100-80gb"):
        card_prior("a1000", 8e9, "fp16")
    with pytest.raises(InputError, match="precision"):
        card_prior("l4", 8e9, "fp12")
    with pytest.raises(InputError, match="cards"):
        card_prior("l4", 8e9, "fp16", cards=0)
    for bad in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(InputError):
            roofline_prior(bad, 2.0, 2e12, 4e14)


def test_the_prior_has_no_opinion_where_its_value_is_zero() -> None:
    prior = card_prior("l4", 8e9, "fp16")
    assert math.isinf(prior_sd(prior, "attention_s")) and math.isfinite(prior_sd(prior, "floor_s"))

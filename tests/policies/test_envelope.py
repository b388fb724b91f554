"""The table of knobs."""

from rooftune.policies.envelope import KNOBS
from rooftune.policies.request import Setting


def test_every_field_of_a_setting_has_exactly_one_row() -> None:
    assert sorted(knob.name for knob in KNOBS) == sorted(Setting._fields)

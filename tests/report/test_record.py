"""Loading a record is strict: what is not exactly a record is one line that names the place."""

import json
import math
from typing import Any

import pytest

from rooftune.policies.errors import InputError
from rooftune.tuner.record import plain
from tests.report.records import bars, record_from_json, record_values, trial


def _load(values: Any) -> None:
    record_from_json(json.dumps(values), "r.json")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"schema": "rooftune.step-model"}, "schema"),
        ({"version": 1}, "version"),
        ({"best": trial("search", 704, whole_traffic=False)}, "must be null when whole_traffic is false"),
        (
            {"best": trial("search", 704, whole_traffic=False, goodput_rps=None, tokens_per_s=None)},
            "must be judged on the whole traffic",
        ),
        ({"curve": record_values()["curve"] | {"tokens": [1, 2]}}, "of one length"),
        ({"timeline": record_values()["timeline"] | {"best": bars(704, 241)}}, "at most 240"),
        ({"colour": "red"}, "colour"),
        ({"noise": 1.5}, "noise"),
        ({"noise": "0.1"}, "noise"),
        ({"verdict": "maybe"}, "verdict"),
        ({"binding": 2}, "binding is 2"),
        ({"best": trial("search", 704, margins=[])}, "0 margins, must be 2"),
        ({"best": trial("search", 704, ttft_p99_s=-1.0)}, "best.ttft_p99_s"),
        ({"best": trial("search", 704, ttft_p99_s="never")}, "best.ttft_p99_s"),
        ({"best": trial("search", 704, setting={})}, "step_tokens"),
        ({"best": trial("search", 704, setting={"step_tokens": 704, "speed": 3})}, "speed"),
        ({"step_model": {}}, "step_model"),
    ],
)
def test_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        _load(record_values(**changed))
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert "r.json" in str(error.value)


@pytest.mark.parametrize("key", sorted(record_values()))
def test_every_key_is_needed(key: str) -> None:
    values = record_values()
    del values[key]
    with pytest.raises(InputError, match=key):
        _load(values)


@pytest.mark.parametrize("text", ["", "[]", "{", "null", '{"noise": NaN}', "\x00", "[" * 5000])
def test_a_missing_record_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        record_from_json(text, "r.json")


def test_missing_and_infinite_are_not_zero() -> None:
    assert plain(math.nan) is None
    assert plain(math.inf) == "inf"
    assert plain(1 / 3) == 0.333333333

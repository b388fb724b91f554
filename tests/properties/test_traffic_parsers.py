"""Any file gives traffic or one InputError line; files that we write round-trip."""

import json
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rooftune.policies.errors import InputError
from rooftune.tuner.cli.flags.values import (
    parse_burst,
    parse_count,
    parse_duration,
    parse_lengths,
    parse_rate_scale,
    parse_share,
)
from rooftune.tuner.traffic.file import write_traffic
from rooftune.tuner.traffic.traces import FORMATS, load_lengths, load_traffic
from rooftune.tuner.traffic.workload import Traffic

HEADERS = [
    "arrival_s,prompt_tokens,output_tokens",
    "arrival_s,prompt_tokens,output_tokens,cached_tokens,tenant",
    "# rooftune-traffic 1\narrival_s,prompt_tokens,output_tokens,tenant",
    "# rooftune-traffic 1 prefix_span_tokens=4\narrival_s,prompt_tokens,output_tokens,prefix_keys",
    "TIMESTAMP,ContextTokens,GeneratedTokens",
    "num_prefill_tokens,num_decode_tokens",
]
KEYS = ["arrival_s", "prompt_tokens", "output_tokens", "cached_tokens", "tenant", "prefix_keys", "format", "version"]
KEYS += ["prefix_span_tokens", "timestamp", "input_length", "output_length", "hash_ids"]
NUMBERS = ["0", "1", "-1", "nan", "inf", "1e400", "1e-400", str(2**70), "0x10", "1_0", "", "2023-11-16 18:15:46.5", "a"]
cells = st.one_of(st.sampled_from(NUMBERS), st.text(max_size=8), st.integers().map(str), st.floats().map(str))
csv_texts = st.builds(
    lambda head, rows: head + "\n" + "\n".join(",".join(row) for row in rows),
    st.sampled_from(HEADERS),
    st.lists(st.lists(cells, min_size=2, max_size=5), max_size=4),
)
json_cells = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)
json_texts = st.lists(st.dictionaries(st.sampled_from(KEYS), json_cells, max_size=8), max_size=4).map(
    lambda rows: "\n".join(json.dumps(row) for row in rows)
)
contents = st.one_of(
    st.binary(max_size=200),
    st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass")),
    csv_texts.map(lambda text: text.encode("utf-8", "surrogatepass")),
    json_texts.map(str.encode),
)


def only_input_errors(call: object, *args: object, **kwargs: object) -> None:
    assert callable(call)
    try:
        call(*args, **kwargs)
    except InputError as error:
        message = str(error)
        assert len(message.splitlines()) == 1
        assert message.isprintable()
        assert len(message) < 600


@settings(max_examples=100, deadline=None)
@given(data=contents, format=st.sampled_from(FORMATS), sort=st.booleans())
def test_bad_files_raise_only_input_errors(data: bytes, format: str, sort: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "f"
        path.write_bytes(data)
        only_input_errors(load_traffic, path, format=format, sort=sort)
        only_input_errors(load_lengths, path)


@settings(max_examples=100, deadline=None)
@given(text=st.one_of(st.text(max_size=20), st.from_regex(r"[0-9.e+x@:/%,-]{0,12}(s|ms|m)?", fullmatch=True)))
def test_bad_values_raise_only_input_errors(text: str) -> None:
    for parse in (parse_duration, parse_rate_scale, parse_burst):
        only_input_errors(parse, text)
    for parse_with in (parse_count, parse_share, parse_lengths):
        only_input_errors(parse_with, text, "--flag")


tenant_names = st.text(min_size=1, max_size=12).filter(lambda name: name.isprintable() and name == name.strip())


@st.composite
def traffics(draw: st.DrawFn) -> Traffic:
    n = draw(st.integers(1, 8))
    arrival_s = sorted(draw(st.lists(st.floats(0.0, 1e9), min_size=n, max_size=n)))
    prompt = draw(st.lists(st.integers(1, 10_000_000), min_size=n, max_size=n))
    names = draw(st.lists(tenant_names, min_size=1, max_size=3, unique=True))
    span = draw(st.sampled_from([0, 1_000_000]))
    rows = [draw(st.lists(st.integers(0, 9), max_size=-(-p // span))) for p in prompt] if span else []
    if span:
        # Numbered by first appearance, as every reader numbers them.
        number: dict[int, int] = {}
        rows = [[number.setdefault(key, len(number)) for key in row] for row in rows]
    return Traffic(
        arrival_s=np.array(arrival_s),
        prompt_tokens=np.array(prompt),
        output_tokens=np.array(draw(st.lists(st.integers(1, 10_000_000), min_size=n, max_size=n))),
        cached_tokens=np.array([draw(st.integers(0, p - 1)) for p in prompt]),
        tenant=np.array(draw(st.lists(st.integers(0, len(names) - 1), min_size=n, max_size=n))),
        tenant_names=tuple(names),
        prefix_offsets=np.cumsum([0, *map(len, rows)]) if span else np.zeros(0, dtype=np.int64),
        prefix_keys=np.array([key for row in rows for key in row], dtype=np.int64),
        prefix_span_tokens=span,
    )


@settings(max_examples=100, deadline=None)
@given(traffic=traffics())
def test_written_traffic_reads_back_bit_for_bit(traffic: Traffic) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.csv"
        write_traffic(path, traffic)
        again = load_traffic(path)
    arrays = ("arrival_s", "prompt_tokens", "output_tokens", "cached_tokens", "prefix_offsets", "prefix_keys")
    for name in arrays:
        assert np.array_equal(getattr(again, name), getattr(traffic, name)), name
    assert again.prefix_span_tokens == traffic.prefix_span_tokens
    named = [[t.tenant_names[i] for i in t.tenant] for t in (traffic, again)]
    assert named[0] == named[1]

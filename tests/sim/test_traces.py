"""Readers of good files return exactly their content."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rooftune.policies.errors import InputError
from rooftune.tuner.traffic.file import write_traffic
from rooftune.tuner.traffic.generate import document_mix
from rooftune.tuner.traffic.traces import load_lengths, load_traffic
from rooftune.tuner.traffic.workload import Traffic

TRACES = Path(__file__).resolve().parents[3] / "shared" / "data" / "traces"
needs_data = pytest.mark.skipif(not TRACES.is_dir(), reason="needs ../shared/data/traces beside the project")

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:59.5000000,374,44
2023-11-16 18:15:59.5000000,396,109
2023-11-16 18:16:01.0000001,879,55
"""
MOONCAKE = """{"timestamp": 1000, "input_length": 1025, "output_length": 6, "hash_ids": [900, 40, 7]}
{"timestamp": 2500, "input_length": 600, "output_length": 1, "hash_ids": [900, 12345678901234567890]}
"""


def made(tmp_path: Path, text: str, name: str = "t.csv") -> Path:
    path = tmp_path / name
    path.write_bytes(text.encode())
    return path


def same_requests(a: Traffic, b: Traffic) -> bool:
    arrays = ("arrival_s", "prompt_tokens", "output_tokens", "cached_tokens", "prefix_offsets", "prefix_keys")
    tenants = [[t.tenant_names[i] for i in t.tenant] for t in (a, b)]
    equal = all(np.array_equal(getattr(a, name), getattr(b, name)) for name in arrays)
    return equal and tenants[0] == tenants[1] and a.prefix_span_tokens == b.prefix_span_tokens


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("zone", ["", "Z", "+00:00"])
def test_azure_times_count_from_the_first_request(tmp_path: Path, ending: str, zone: str) -> None:
    text = AZURE.replace(",374", f"{zone},374").replace("\n", ending)
    traffic = load_traffic(made(tmp_path, text))
    assert traffic.arrival_s.tolist() == [0.0, 0.0, 1.5000001]
    assert traffic.prompt_tokens.tolist() == [374, 396, 879]
    assert traffic.output_tokens.tolist() == [44, 109, 55]
    assert traffic.name == "t.csv"


def test_mooncake_ids_become_dense_prefix_keys(tmp_path: Path) -> None:
    traffic = load_traffic(made(tmp_path, MOONCAKE, "t.jsonl"))
    assert traffic.arrival_s.tolist() == [0.0, 1.5]
    assert traffic.prefix_offsets.tolist() == [0, 3, 5]
    assert traffic.prefix_keys.tolist() == [0, 1, 2, 0, 3]
    assert traffic.prefix_span_tokens == 512


def test_general_csv_and_jsonl_give_the_same_traffic(tmp_path: Path) -> None:
    csv = (
        "# rooftune-traffic 1\ntenant,output_tokens,arrival_s,prompt_tokens,cached_tokens\n"
        '"a, b",5,0.1,10,9\nz,6,1e-1,20,0\n'
    )
    jsonl = (
        '{"format": "rooftune-traffic", "version": 1}\n'
        '{"arrival_s": 0.1, "prompt_tokens": 10, "output_tokens": 5, "cached_tokens": 9, "tenant": "a, b"}\n\n'
        '{"arrival_s": 0.1, "prompt_tokens": 20, "output_tokens": 6, "tenant": "z"}'
    )
    one, two = load_traffic(made(tmp_path, csv)), load_traffic(made(tmp_path, jsonl, "t.jsonl"))
    assert same_requests(one, two)
    assert one.tenant_names == ("a, b", "z")
    assert one.cached_tokens.tolist() == [9, 0]


def test_the_marker_and_the_optional_columns_may_be_left_out(tmp_path: Path) -> None:
    traffic = load_traffic(made(tmp_path, "\ufeffarrival_s, prompt_tokens, output_tokens\n0, 7, 8\n"))
    assert traffic.tenant_names == ("default",)
    assert traffic.cached_tokens.tolist() == [0]


def test_sort_is_stable_and_keeps_the_fields_of_a_request_together(tmp_path: Path) -> None:
    rows = [(3, 30, "c"), (1, 10, "a"), (3, 31, "d"), (1, 11, "b")]
    text = "arrival_s,prompt_tokens,output_tokens,tenant\n" + "".join(f"{t},{p},1,{n}\n" for t, p, n in rows)
    refusal = r"line 3: arrival_s is '1', must be no earlier than '3' of line 2; pass --sort"
    with pytest.raises(InputError, match=refusal):
        load_traffic(made(tmp_path, text))
    traffic = load_traffic(made(tmp_path, text), sort=True)
    assert traffic.prompt_tokens.tolist() == [10, 11, 30, 31]
    assert [traffic.tenant_names[i] for i in traffic.tenant] == ["a", "b", "c", "d"]


def test_sort_moves_prefix_content_with_its_request(tmp_path: Path) -> None:
    swapped = "\n".join(reversed(MOONCAKE.splitlines()))
    traffic = load_traffic(made(tmp_path, swapped, "t.jsonl"), sort=True)
    assert same_requests(traffic, load_traffic(made(tmp_path, MOONCAKE, "u.jsonl")))


def test_prefix_content_survives_the_general_file(tmp_path: Path) -> None:
    traffic = load_traffic(made(tmp_path, MOONCAKE, "t.jsonl"))
    write_traffic(tmp_path / "out.csv", traffic)
    assert same_requests(load_traffic(tmp_path / "out.csv"), traffic)


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    traffic = load_traffic(made(tmp_path, AZURE))
    target = made(tmp_path, "old", "out.csv")
    with pytest.raises(InputError, match="tenant name"):
        write_traffic(target, replace(traffic, tenant_names=("\ud800",)))
    with pytest.raises(InputError, match="cannot write"):
        write_traffic(tmp_path / "absent" / "out.csv", traffic)
    with pytest.raises(InputError, match="is a folder"):
        write_traffic(tmp_path, traffic)
    with pytest.raises(InputError, match="not a regular file"):
        write_traffic("/dev/null", traffic)
    assert target.read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.csv", "t.csv"]


def test_lengths_file(tmp_path: Path) -> None:
    text = "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n74,918,992,0.08\n290,905,1195,0.3\n"
    path = made(tmp_path, text)
    assert [part.tolist() for part in load_lengths(path)] == [[74, 290], [918, 905]]
    with pytest.raises(InputError, match=r"without arrival times.*generate --lengths"):
        load_traffic(path)


def test_lengths_of_a_traffic_file_of_ours_are_taken_alone(tmp_path: Path) -> None:
    traffic = document_mix(1, 2.0, 30.0, 8, (2_000, 4_000))
    write_traffic(tmp_path / "made.csv", traffic)
    prompt, output = load_lengths(tmp_path / "made.csv")
    assert (prompt == traffic.prompt_tokens).all() and (output == traffic.output_tokens).all()


@needs_data
@pytest.mark.shared_data
@pytest.mark.parametrize(
    ("name", "requests", "whole_span_s", "prompt_p50"),
    [
        ("azure-2023-conv.csv", 19_366, 3501, 1020),
        ("azure-2023-code.csv", 8_819, 3435, None),
        ("mooncake-synthetic.jsonl", 3_993, 1022, None),
    ],
)
def test_public_traces(name: str, requests: int, whole_span_s: int, prompt_p50: int | None, tmp_path: Path) -> None:
    traffic = load_traffic(TRACES / name)
    assert len(traffic) == requests
    assert int(traffic.span_s) == whole_span_s
    if prompt_p50 is not None:
        assert int(np.median(traffic.prompt_tokens)) == prompt_p50
    if name.startswith("mooncake"):
        assert traffic.prefix_keys.max() + 1 == len(set(traffic.prefix_keys.tolist())) == 43_924
    write_traffic(tmp_path / "copy.csv", traffic)
    assert same_requests(load_traffic(tmp_path / "copy.csv"), traffic)

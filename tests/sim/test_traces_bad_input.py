"""Bad files: one clear line each that names file, line, column, value and bound."""

from pathlib import Path

import pytest

from rooftune.policies.errors import InputError
from rooftune.tuner.traffic.traces import load_lengths, load_traffic

HEAD = "arrival_s,prompt_tokens,output_tokens\n"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
TIME = "2023-11-16 18:15:46.6805900"
OBJECT = '{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1}\n'
CASES = [
    ("", "is empty"),
    (" \n\n", "is empty"),
    (HEAD, "header and no requests"),
    ("# rooftune-traffic 1\n", "no header"),
    ("# rooftune-traffic 2\n" + HEAD + "0,1,1\n", "line 1: version is 2, this Rooftune reads 1"),
    ("# my notes\n" + HEAD + "0,1,1\n", "line 1: '# my notes' is not a marker"),
    ("arrival_s,prompt_tokens\n0,1\n", "column output_tokens is missing"),
    ("arrival_s,prompt_tokens,output_tokens,colour\n0,1,1,red\n", "column 'colour' is unknown"),
    ("arrival_s,arrival_s,prompt_tokens,output_tokens\n0,0,1,1\n", "column arrival_s appears 2 times"),
    (HEAD + "0,1,1\n0,1\n", "line 3: 2 values, the header names 3"),
    (HEAD + "0,1,1\n\n-1,1,1\n", "line 4: arrival_s is '-1', must be a finite number within 0..1e+09"),
    (HEAD + "nan,1,1\n", "line 2: arrival_s is 'nan'"),
    (HEAD + "inf,1,1\n", "line 2: arrival_s is 'inf'"),
    (HEAD + "1e400,1,1\n", "line 2: arrival_s is '1e400'"),
    (HEAD + "1700000000,1,1\n", "count seconds from the first request"),
    (HEAD + "0,0,1\n", "line 2: prompt_tokens is '0', must be a whole number within 1..10000000"),
    (HEAD + f"0,{2**70},1\n", "line 2: prompt_tokens is '1180591620717411303424', must be a whole number"),
    (HEAD + "0," + "9" * 9000 + ",1\n", "line 2: prompt_tokens is '999"),
    (HEAD + "0,1,-5\n", "line 2: output_tokens is '-5'"),
    (HEAD + "0,1,1.5\n", "line 2: output_tokens is '1.5'"),
    (HEAD + "0,1,1_0\n", "line 2: output_tokens is '1_0'"),
    (HEAD + "0,1,\n", "line 2: output_tokens is ''"),
    (HEAD + "2,1,1\n1,1,1\n", "line 3: arrival_s is '1', must be no earlier than '2' of line 2; pass --sort"),
    (HEAD + '0,"1,1\n', "not CSV"),
    ("arrival_s,prompt_tokens,output_tokens,cached_tokens\n0,5,1,5\n", "cached_tokens is '5', must be within 0..4"),
    ("arrival_s,prompt_tokens,output_tokens,tenant\n0,5,1,\n", "tenant is ''"),
    ("arrival_s,prompt_tokens,output_tokens,prefix_keys\n0,5,1,1\n", "prefix_keys without prefix_span_tokens"),
    (
        "# rooftune-traffic 1 prefix_span_tokens=4\narrival_s,prompt_tokens,output_tokens,prefix_keys\n0,5,1,1 2 3\n",
        "line 3: prefix_keys is '1 2 3', must be at most 2 whole numbers",
    ),
    (AZURE + f"{TIME},1,0\n", "line 2: GeneratedTokens is '0'"),
    (AZURE + f"{TIME},1,1\n2023-11-16 18:15:46,1,1\n", "line 3: TIMESTAMP is '2023-11-16 18:15:46', must be no ear"),
    (AZURE + "2023-13-16 18:15:46,1,1\n", "line 2: TIMESTAMP is '2023-13-16 18:15:46', must be a date and time that"),
    (AZURE + "9999-01-01 00:00:00,1,1\n", "line 2: TIMESTAMP"),
    (AZURE + "2023-11-16 18:15:46+02:00,1,1\n", "line 2: TIMESTAMP"),
    ("TIMESTAMP,ContextTokens\n" + f"{TIME},1\n", "column GeneratedTokens is missing"),
    (OBJECT + "{", "line 2: not JSON"),
    (OBJECT + "[1]", "line 2: [1] is not an object"),
    (OBJECT + "[" * 200_000, "line 2: not JSON"),
    ('{"arrival_s": 0, "arrival_s": 1, "prompt_tokens": 1, "output_tokens": 1}', "key 'arrival_s' appears twice"),
    (OBJECT.replace("0,", "NaN,"), "line 1: not JSON (NaN"),
    (OBJECT.replace("0,", "1e400,"), "line 1: arrival_s is inf"),
    (OBJECT.replace("0,", "9" * 400 + ","), "line 1: arrival_s is 9999"),
    (OBJECT.replace("0,", "9" * 5000 + ","), "line 1: not JSON"),
    (OBJECT.replace("0,", "true,"), "line 1: arrival_s is True"),
    (OBJECT.replace("0,", '"x",'), "line 1: arrival_s is 'x'"),
    (OBJECT.replace("}", ', "hue": 1}'), "column 'hue' is unknown"),
    (OBJECT + '{"arrival_s": 1, "prompt_tokens": 1}', "line 2: column output_tokens is missing"),
    ('{"format": "rooftune-traffic", "version": 2}\n' + OBJECT, "version is 2"),
    ('{"format": "rooftune-traffic", "version": 1}\n', "holds no requests"),
    (
        '{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1]}',
        "line 1: hash_ids is [1], must be a list of 2 ids, one for each 512 prompt tokens",
    ),
    ('{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [-1]}', "not -1"),
    ('{"timestamp": 0, "input_length": 1, "output_length": 1, "chat_id": 7}', "column 'chat_id' is unknown"),
]


@pytest.mark.parametrize(("text", "expected"), CASES, ids=range(len(CASES)))
def test_bad_traffic_is_one_line_that_names_the_place(text: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        load_traffic(path)
    message = str(caught.value)
    assert expected in message
    assert "bad.csv" in message
    assert "\n" not in message
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("data", [b"\xff\xfe\x00", b"arrival_s,prompt_tokens\0", b"\x80" * 50, b"\x1f\x8b\x08\x00"])
def test_binary(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"bad\.csv is (not UTF-8|binary)"):
        load_traffic(path)


def test_paths_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a folder"):
        load_traffic(tmp_path)
    with pytest.raises(InputError, match="does not exist"):
        load_traffic(tmp_path / "absent.csv")
    with pytest.raises(InputError, match="cannot read"):
        load_traffic(tmp_path / ("x" * 5000))
    with pytest.raises(InputError, match="not a valid path"):
        load_traffic("a\0b")
    with pytest.raises(InputError, match="traffic format is 'xml', must be one of auto, azure"):
        load_traffic(tmp_path / "absent.csv", format="xml")


def test_a_lengths_file_is_checked_too(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text("prompt_tokens,output_tokens\n5,0\n")
    with pytest.raises(InputError, match=r"line 2: output_tokens is '0'"):
        load_lengths(path)

"""Readers of public trace formats, and ``load_traffic``, the entry point for every kind of traffic file.

- ``azure``: CSV of the Azure LLM inference traces, TIMESTAMP,ContextTokens,GeneratedTokens
  (https://github.com/Azure/AzurePublicDataset); times count from the first request.
- ``mooncake``: JSON lines of the Mooncake traces, timestamp (ms), input_length, output_length, hash_ids
  (https://github.com/kvcache-ai/Mooncake); each id names 512 tokens of prompt together with all before them.
- ``csv``, ``jsonl``: the general traffic file, see ``file.py``.
- Lengths files hold prompt and output lengths without times; they feed the generator (``load_lengths``).
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from rooftune.policies.errors import InputError, bad_value, shown
from rooftune.tuner.files import read_text, shown_path
from rooftune.tuner.traffic.file import in_order_of_arrival, parse_csv, parse_jsonl, prefix_rows
from rooftune.tuner.traffic.tables import ABSENT, Table, csv_table, decimal_column, json_rows, json_table, whole_column
from rooftune.tuner.traffic.workload import MAX_ARRIVAL_S, MAX_TOKENS_PER_REQUEST, FloatArray, IntArray, Traffic

TrafficFormat = Literal["auto", "azure", "mooncake", "csv", "jsonl"]
FORMATS: tuple[str, ...] = get_args(TrafficFormat)

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOONCAKE_KEYS = ("timestamp", "input_length", "output_length")
MOONCAKE_SPAN_TOKENS = 512
MAX_TIMESTAMP_MS = 1e15
# Names of a lengths file: Sarathi-Serve's, and ours.
LENGTH_COLUMNS = {"num_prefill_tokens": "num_decode_tokens", "prompt_tokens": "output_tokens"}

# Years whose nanoseconds fit 64 bits; numpy wraps others silently.
_TIMESTAMP = re.compile(
    r"(?:19|20)[0-9]{2}-[0-9]{2}-[0-9]{2}[ T][0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{1,9})?(?:\+00:00|Z)?"
)


def load_traffic(path: str | Path, *, format: str = "auto", sort: bool = False) -> Traffic:
    """Read a traffic file of any known format; ``auto`` looks at the first line.

    sort: put requests that are out of order into order of arrival (stably) instead of refusing the file.
    The traffic is named after the file. Raises InputError naming file, line, column, value, bound and remedy.
    """
    if format not in FORMATS:
        raise bad_value("traffic format", format, f"one of {', '.join(FORMATS)}", "choose one")
    return replace(_parse(read_text(path), shown_path(path), format, sort), name=Path(path).name)


def _parse(text: str, where: str, format: str, sort: bool) -> Traffic:
    kind = _kind_of(text, where) if format == "auto" else format
    if kind == "azure":
        return _azure(csv_table(text, where, AZURE_COLUMNS, ()), sort)
    if kind == "csv":
        return parse_csv(text, where, sort=sort)
    rows, lines = json_rows(text, where)
    if kind == "jsonl" or (format == "auto" and not _looks_like_mooncake(rows)):
        return parse_jsonl(rows, lines, where, sort=sort)
    return _mooncake(json_table(rows, lines, where, MOONCAKE_KEYS, ("hash_ids",)), sort)


def load_lengths(path: str | Path) -> tuple[IntArray, IntArray]:
    """Prompt and output lengths (tokens, at least 1, shape (n,) each) of a CSV without arrival times.

    It reads the columns num_prefill_tokens and num_decode_tokens, or prompt_tokens and output_tokens; derived
    columns of the first kind (num_total_tokens, pd_ratio) are ignored. Of a traffic file that ``write_traffic`` wrote
    it takes the lengths alone. Raises InputError.
    """
    text = read_text(path)
    if text.startswith("#"):
        made = parse_csv(text, shown_path(path))
        return made.prompt_tokens, made.output_tokens
    header = _header(text)
    prompt = "num_prefill_tokens" if "num_prefill_tokens" in header else "prompt_tokens"
    output = LENGTH_COLUMNS[prompt]
    extra = ("num_total_tokens", "pd_ratio") if prompt == "num_prefill_tokens" else ()
    table = csv_table(text, shown_path(path), (prompt, output), extra)
    return (
        whole_column(table, prompt, 1, MAX_TOKENS_PER_REQUEST),
        whole_column(table, output, 1, MAX_TOKENS_PER_REQUEST),
    )


def _header(text: str) -> list[str]:
    first = re.split(r"[\r\n]", text.lstrip("\r\n"), maxsplit=1)[0]
    return [cell.strip().strip('"') for cell in first.split(",")]


def _kind_of(text: str, where: str) -> str:
    """The format by the first line: azure, csv, or json (its first object says which of the two)."""
    if text.lstrip()[0] in "{[":
        return "json"
    header = _header(text)
    if "TIMESTAMP" in header or "ContextTokens" in header:
        return "azure"
    if "num_prefill_tokens" in header:
        raise InputError(
            f"{where} holds lengths without arrival times; make traffic from it: rooftune generate --lengths {where}"
        )
    return "csv"


def _looks_like_mooncake(rows: list[dict[str, object]]) -> bool:
    return bool(rows) and ("hash_ids" in rows[0] or "input_length" in rows[0])


def _azure(table: Table, sort: bool) -> Traffic:
    arrival_s = _timestamps_s(table, "TIMESTAMP")
    table, arrival_s = in_order_of_arrival(table, "TIMESTAMP", arrival_s, sort)
    prompt = whole_column(table, "ContextTokens", 1, MAX_TOKENS_PER_REQUEST)
    output = whole_column(table, "GeneratedTokens", 1, MAX_TOKENS_PER_REQUEST)
    return _from_zero(table, arrival_s, prompt, output, None)


def _timestamps_s(table: Table, column: str) -> FloatArray:
    """Seconds since the first row, from UTC timestamps with up to nine decimals."""
    cells: list[str] = []
    for row, cell in enumerate(table.columns[column]):
        if not isinstance(cell, str) or not _TIMESTAMP.fullmatch(cell):
            table.refuse(row, column, "a UTC time like 2023-11-16 18:15:46.680590")
        cells.append(cell.removesuffix("Z").removesuffix("+00:00"))
    try:
        moments = np.array(cells, dtype="datetime64[ns]")
    except ValueError:  # a month 13 or a second 61: find the row
        for row, text in enumerate(cells):
            try:
                np.datetime64(text, "ns")
            except ValueError:
                table.refuse(row, column, "a date and time that exist")
        raise
    since_first: FloatArray = (moments - moments[0]).astype(np.int64) / 1e9
    return since_first


def _mooncake(table: Table, sort: bool) -> Traffic:
    arrival_s = decimal_column(table, "timestamp", 0.0, MAX_TIMESTAMP_MS, "give milliseconds") / 1e3
    table, arrival_s = in_order_of_arrival(table, "timestamp", arrival_s, sort)
    prompt = whole_column(table, "input_length", 1, MAX_TOKENS_PER_REQUEST)
    output = whole_column(table, "output_length", 1, MAX_TOKENS_PER_REQUEST)
    if "hash_ids" not in table.columns:
        return _from_zero(table, arrival_s, prompt, output, None)
    rows: list[list[int]] = []
    for row, cell in enumerate(table.columns["hash_ids"]):
        keys = [] if cell is ABSENT else cell
        blocks = -(-int(prompt[row]) // MOONCAKE_SPAN_TOKENS)
        # Another count means another block size (other traces use the same names with 16-token blocks).
        if not isinstance(keys, list) or (cell is not ABSENT and len(keys) != blocks):
            table.refuse(row, "hash_ids", f"a list of {blocks} ids, one for each {MOONCAKE_SPAN_TOKENS} prompt tokens")
        for key in keys:
            if type(key) is not int or key < 0:
                table.refuse(row, "hash_ids", f"whole numbers of at least 0, not {shown(key)}")
        rows.append(keys)
    return _from_zero(table, arrival_s, prompt, output, prefix_rows(rows))


def _from_zero(
    table: Table, arrival_s: FloatArray, prompt: IntArray, output: IntArray, prefixes: tuple[IntArray, IntArray] | None
) -> Traffic:
    """Traffic whose first request arrives at 0 (the traces count from an instant of their own).

    prefixes: offsets and keys of ``Traffic``, None where no content is known.
    """
    arrival_s = arrival_s - arrival_s[0]
    if arrival_s[-1] > MAX_ARRIVAL_S:
        raise InputError(
            f"{table.where} spans {arrival_s[-1]:g} s, must be at most {MAX_ARRIVAL_S:g} s; correct its times"
        )
    none = np.zeros(len(prompt), dtype=np.int64)
    traffic = Traffic(arrival_s, prompt, output, cached_tokens=none, tenant=none, name=table.where)
    if prefixes is None:
        return traffic
    offsets, keys = prefixes
    return replace(traffic, prefix_offsets=offsets, prefix_keys=keys, prefix_span_tokens=MOONCAKE_SPAN_TOKENS)

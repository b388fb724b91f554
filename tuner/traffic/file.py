"""The general traffic file: its schema, its version, its reader and its writer.

CSV, one request a line in order of arrival:

    # rooftune-traffic 1
    arrival_s,prompt_tokens,output_tokens,cached_tokens,tenant
    0.0,1020,129,0,default

The first line is always written; a file made by hand may omit it (it then counts as version 1).
``cached_tokens`` (default 0) and ``tenant`` (default "default") are optional. JSON lines hold the same names as
keys; their marker is a first object ``{"format": "rooftune-traffic", "version": 1}``. Known prompt content is
the optional column ``prefix_keys``: whole numbers with spaces between them (JSON: a list), one for each leading
``prefix_span_tokens`` prompt tokens, a number that then stands in the marker (``# rooftune-traffic 1
prefix_span_tokens=512``). An unknown column or version is an error.
"""

import csv
import io
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from rooftune.policies.errors import InputError, shown
from rooftune.tuner.files import shown_path, write_text
from rooftune.tuner.traffic.tables import ABSENT, Table, csv_table, decimal_column, json_table, whole_column
from rooftune.tuner.traffic.workload import MAX_ARRIVAL_S, MAX_TOKENS_PER_REQUEST, FloatArray, IntArray, Traffic

FORMAT = "rooftune-traffic"
VERSION = 1
REQUIRED = ("arrival_s", "prompt_tokens", "output_tokens")
OPTIONAL = ("cached_tokens", "tenant", "prefix_keys")
DEFAULT_TENANT = "default"
MAX_TENANT_CHARACTERS = 100
MAX_PREFIX_KEY = 2**31 - 1

_MARKER = re.compile(r"# rooftune-traffic ([0-9]{1,9})(?: prefix_span_tokens=([0-9]{1,8}))?[ \t]*")
_KEYS = re.compile(r"(?:[0-9]{1,10}(?: [0-9]{1,10})*)?")


def parse_csv(text: str, where: str, *, sort: bool = False) -> Traffic:
    """Traffic from the text of a general CSV. Raises InputError naming line, column, value and bound."""
    span_tokens, skip_lines = 0, 0
    if text.startswith("#"):
        first = re.split(r"[\r\n]", text, maxsplit=1)[0]
        match = _MARKER.fullmatch(first)
        if match is None:
            raise InputError(
                f"{where} line 1: {shown(first)} is not a marker; write '# {FORMAT} {VERSION}' or drop the line"
            )
        _check_version(int(match[1]), where)
        span_tokens, skip_lines = int(match[2] or 0), 1
    return _traffic(csv_table(text, where, REQUIRED, OPTIONAL, skip_lines), span_tokens, sort)


def parse_jsonl(rows: list[dict[str, object]], lines: list[int], where: str, *, sort: bool = False) -> Traffic:
    """Traffic from the objects of a general JSONL file (see ``tables.json_rows``). Raises InputError."""
    span_tokens = 0
    if rows and "format" in rows[0]:
        marker = rows[0]
        unknown = sorted(marker.keys() - {"format", "version", "prefix_span_tokens"})
        if unknown or marker["format"] != FORMAT:
            wrong = f"key {shown(unknown[0])} is unknown" if unknown else f"format is {shown(marker['format'])}"
            right = f'{{"format": "{FORMAT}", "version": {VERSION}}}'
            raise InputError(f"{where} line {lines[0]}: {wrong}; write {right}")
        _check_version(marker.get("version"), where)
        span = marker.get("prefix_span_tokens", 0)
        if type(span) is not int or not 0 <= span <= MAX_TOKENS_PER_REQUEST:
            raise InputError(
                f"{where} line {lines[0]}: prefix_span_tokens is {shown(span)}, must be a whole number "
                f"within 0..{MAX_TOKENS_PER_REQUEST}; correct it"
            )
        span_tokens, rows, lines = span, rows[1:], lines[1:]
    return _traffic(json_table(rows, lines, where, REQUIRED, OPTIONAL), span_tokens, sort)


def write_traffic(path: str | Path, traffic: Traffic) -> None:
    """Write a general CSV, whole or not at all; reading it back gives the same requests, bit for bit.

    (Tenants are numbered by first appearance in the file, and the name becomes the file's.) Raises InputError.
    """
    if Path(path).suffix.lower() in (".jsonl", ".json"):
        raise InputError(f"{shown_path(path)}: traffic is written as CSV; end the name in .csv")
    for name in traffic.tenant_names:
        if not _tenant_fits(name):
            raise InputError(f"tenant name {shown(name)} must be {_TENANT_BOUND}; rename it")
    stream = io.StringIO(newline="")
    known_content = len(traffic.prefix_offsets) > 0
    stream.write(f"# {FORMAT} {VERSION}")
    stream.write(f" prefix_span_tokens={traffic.prefix_span_tokens}\n" if known_content else "\n")
    writer = csv.writer(stream, lineterminator="\n")
    columns: list[Sequence[object]] = [
        traffic.arrival_s.tolist(),
        traffic.prompt_tokens.tolist(),
        traffic.output_tokens.tolist(),
        traffic.cached_tokens.tolist(),
        [traffic.tenant_names[index] for index in traffic.tenant.tolist()],
    ]
    header = [*REQUIRED, "cached_tokens", "tenant"]
    if known_content:
        header.append("prefix_keys")
        bounds, keys = traffic.prefix_offsets.tolist(), traffic.prefix_keys.tolist()
        columns.append([" ".join(map(str, keys[a:b])) for a, b in pairwise(bounds)])
    writer.writerow(header)
    writer.writerows(zip(*columns, strict=True))
    write_text(path, stream.getvalue())


def in_order_of_arrival(table: Table, column: str, arrival_s: FloatArray, sort: bool) -> tuple[Table, FloatArray]:
    """Table and arrivals unchanged if the arrivals ascend (repeated times are legal), else sorted stably.

    Raises InputError at the first line that goes back in time, unless ``sort`` allows the sorting.
    """
    back = np.flatnonzero(np.diff(arrival_s) < 0)
    if len(back) == 0:
        return table, arrival_s
    if not sort:
        row = int(back[0]) + 1
        before = f"{shown(table.columns[column][row - 1])} of line {table.lines[row - 1]}"
        table.refuse(row, column, f"no earlier than {before}", "pass --sort to have the requests sorted by time")
    order = np.argsort(arrival_s, kind="stable")
    return table.take(order.tolist()), arrival_s[order]


def prefix_rows(rows: Sequence[Sequence[int]]) -> tuple[IntArray, IntArray]:
    """Compressed rows of ``Traffic``: offsets, shape (n + 1,), and keys renumbered 0.. by first appearance."""
    number: dict[int, int] = {}
    keys = [number.setdefault(key, len(number)) for row in rows for key in row]
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    return offsets, np.array(keys, dtype=np.int64)


_TENANT_BOUND = f"1..{MAX_TENANT_CHARACTERS} printable characters without spaces at its ends"


def _tenant_fits(name: object) -> bool:
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_TENANT_CHARACTERS:
        return False
    return name.isprintable() and name == name.strip()


def _check_version(version: object, where: str) -> None:
    if type(version) is not int or version != VERSION:
        raise InputError(
            f"{where} line 1: version is {shown(version)}, this Rooftune reads {VERSION}; convert the file"
        )


def _traffic(table: Table, span_tokens: int, sort: bool) -> Traffic:
    arrival_s = decimal_column(table, "arrival_s", 0.0, MAX_ARRIVAL_S, "count seconds from the first request")
    table, arrival_s = in_order_of_arrival(table, "arrival_s", arrival_s, sort)
    prompt = whole_column(table, "prompt_tokens", 1, MAX_TOKENS_PER_REQUEST)
    tenant, names = _tenants(table)
    offsets, keys = _prefixes(table, span_tokens, prompt)
    return Traffic(
        arrival_s=arrival_s,
        prompt_tokens=prompt,
        output_tokens=whole_column(table, "output_tokens", 1, MAX_TOKENS_PER_REQUEST),
        cached_tokens=_cached(table, prompt),
        tenant=tenant,
        tenant_names=names,
        prefix_offsets=offsets,
        prefix_keys=keys,
        prefix_span_tokens=span_tokens,
        name=table.where,
    )


def _cached(table: Table, prompt: IntArray) -> IntArray:
    if "cached_tokens" not in table.columns:
        return np.zeros(len(prompt), dtype=np.int64)
    cells = table.columns["cached_tokens"]
    table.columns["cached_tokens"] = [0 if cell is ABSENT else cell for cell in cells]
    cached = whole_column(table, "cached_tokens", 0, MAX_TOKENS_PER_REQUEST)
    over = np.flatnonzero(cached >= prompt)
    if len(over):
        row = int(over[0])
        table.refuse(row, "cached_tokens", f"within 0..{prompt[row] - 1} (prompt_tokens - 1)")
    return cached


def _tenants(table: Table) -> tuple[IntArray, tuple[str, ...]]:
    if "tenant" not in table.columns:
        return np.zeros(len(table.lines), dtype=np.int64), (DEFAULT_TENANT,)
    number: dict[str, int] = {}
    tenant: list[int] = []
    for row, cell in enumerate(table.columns["tenant"]):
        name = DEFAULT_TENANT if cell is ABSENT else cell
        if not isinstance(name, str) or not _tenant_fits(name):
            table.refuse(row, "tenant", _TENANT_BOUND)
        tenant.append(number.setdefault(name, len(number)))
    return np.array(tenant, dtype=np.int64), tuple(number)


def _prefixes(table: Table, span_tokens: int, prompt: IntArray) -> tuple[IntArray, IntArray]:
    has_keys = "prefix_keys" in table.columns
    if has_keys != (span_tokens > 0):
        found, lacking = ("prefix_keys", "prefix_span_tokens") if has_keys else ("prefix_span_tokens", "prefix_keys")
        raise InputError(f"{table.where}: {found} without {lacking}; give both, the span in the first line, or neither")
    if not has_keys:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    rows: list[list[int]] = []
    for row, cell in enumerate(table.columns["prefix_keys"]):
        keys: object = [] if cell is ABSENT else cell
        if isinstance(cell, str) and _KEYS.fullmatch(cell):
            keys = [int(part) for part in cell.split()]
        at_most = -(-int(prompt[row]) // span_tokens)
        if (
            not isinstance(keys, list)
            or len(keys) > at_most
            or not all(type(key) is int and 0 <= key <= MAX_PREFIX_KEY for key in keys)
        ):
            table.refuse(row, "prefix_keys", f"at most {at_most} whole numbers within 0..{MAX_PREFIX_KEY}")
        rows.append(keys)
    return prefix_rows(rows)

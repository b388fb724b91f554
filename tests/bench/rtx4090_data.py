"""A real vLLM 0.19 on an RTX 4090 serving 300 requests: its flags and stamps beside the project, read as our values."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rooftune.policies.errors import InputError, bad_value
from rooftune.policies.request import Boot, FloatArray, IntArray, Setting
from rooftune.tuner.model.profile import read_json
from rooftune.tuner.sim.engine import Engine
from rooftune.tuner.traffic.workload import Traffic

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "data" / "profiles" / "vllm-rtx4090-llama-3.1-8b"
# Llama-3.1-8B: num_hidden_layers (the profile is of one).
LAYERS = 32
_STAMPS = ("input_toks", "output_toks", "queued_ts", "first_token_ts", "last_token_ts")


@dataclass(frozen=True)
class ServedRun:
    """What the twin is given (traffic, engine, setting) and, apart from it, what is only for judging.

    ttft_s: queued to first token; tpot_s: (last - first token) / (output tokens - 1). One value a request, in order.
    """

    traffic: Traffic
    engine: Engine
    setting: Setting
    ttft_s: FloatArray
    tpot_s: FloatArray


def read_run(folder: Path = FOLDER) -> ServedRun:
    """Read requests.jsonl and meta.json. Raises InputError when a file is absent or not as expected."""
    rows = _requests(folder / "requests.jsonl")
    column = {name: np.array([row[name] for row in rows], dtype=np.float64) for name in _STAMPS}
    queued, output = column["queued_ts"], column["output_toks"].astype(np.int64)
    none: IntArray = np.zeros(len(rows), dtype=np.int64)
    traffic = Traffic(queued - queued[0], column["input_toks"].astype(np.int64), output, none, none, name="rtx4090")
    engine, setting = _engine(folder / "meta.json")
    return ServedRun(
        traffic,
        engine,
        setting,
        column["first_token_ts"] - queued,
        (column["last_token_ts"] - column["first_token_ts"]) / (output - 1),
    )


def _requests(path: Path) -> list[dict[str, float]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}; put the folder shared/data beside the project") from error
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict) or not all(isinstance(row.get(name), (int, float)) for name in _STAMPS):
            raise bad_value(
                f"{path} line {number}", row, f"an object with the numbers {', '.join(_STAMPS)}", "repair it"
            )
        if row["output_toks"] < 2:
            raise bad_value(f"{path} line {number}: output_toks", row["output_toks"], "at least 2", "repair it")
    if not rows:
        raise InputError(f"{path} holds no requests; put the folder shared/data beside the project")
    return rows


def _engine(path: Path) -> tuple[Engine, Setting]:
    """The engine as its resolved configuration says; one block of the pool is vLLM's null block and holds nothing."""
    meta = read_json(path)
    if not isinstance(meta, dict):
        raise bad_value(f"{path}", type(meta).__name__, "a JSON object", "give vLLM's resolved configuration unchanged")
    try:
        cache, scheduler = meta["kv_cache"], meta["resolved_config"]["scheduler_config"]
        budget, places = int(scheduler["max_num_batched_tokens"]), int(scheduler["max_num_seqs"])
        boot = Boot(
            ceiling_tokens=budget,
            block_tokens=int(cache["block_size"]),
            chunking=int(scheduler["enable_chunked_prefill"]),
            reserve_whole_prompt=int(scheduler["scheduler_reserve_full_isl"]),
            contents=int(cache["enable_prefix_caching"]),
            keep_decodes_moving=0,
            plan_ahead=int(scheduler["async_scheduling"]),
        )
        return Engine(boot, int(cache["num_gpu_blocks"]) - 1, places), Setting(budget, max_running=places)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{path} does not hold vLLM's resolved configuration ({error!r}); give it unchanged"
        ) from error

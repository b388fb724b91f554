"""``python -m rooftune.tuner.bench.rounds_client URL MODEL FILE``:
sends the list of FILE once for each line "go" on standard
input, at its times, and says "done" when the last answer is there. Answers come whole: who wants the time of each token
asks the engine, and this process takes next to none of the machine."""

import asyncio
import json
import random
import sys
import time
from pathlib import Path

import httpx

from rooftune.tuner.traffic.traces import load_traffic

# Token ids of prompts that every vocabulary has, above the special ones of most.
IDS = (10, 250)
WAIT_S = 600.0


async def send_list(http: httpx.AsyncClient, url: str, bodies: list[tuple[float, bytes]]) -> None:
    """Every body at its time; returns when all are answered. Raises httpx.HTTPError."""
    start_s = time.monotonic()

    async def one(at_s: float, body: bytes) -> None:
        await asyncio.sleep(max(0.0, start_s + at_s - time.monotonic()))
        answer = await http.post(f"{url}/v1/completions", content=body, headers={"content-type": "application/json"})
        answer.raise_for_status()

    async with asyncio.TaskGroup() as group:
        for at_s, body in bodies:
            group.create_task(one(at_s, body))


def bodies_of(rows: list[tuple[float, int, int]], model: str, chance: random.Random) -> list[tuple[float, bytes]]:
    """Fresh prompts of exactly these lengths, so that no prefix is found again."""
    made = []
    for at_s, prompt, output in rows:
        tokens = [chance.randrange(*IDS) for _ in range(prompt)]
        body = {"model": model, "prompt": tokens, "max_tokens": output, "ignore_eos": True, "temperature": 0.0}
        made.append((at_s, json.dumps(body).encode()))
    return made


async def main(url: str, model: str, path: Path) -> None:
    traffic = load_traffic(path)
    columns = (traffic.arrival_s, traffic.prompt_tokens, traffic.output_tokens)
    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    chance = random.Random(1)
    async with httpx.AsyncClient(timeout=WAIT_S, limits=limits, trust_env=False) as http:
        print("ready", flush=True)
        while (await asyncio.to_thread(sys.stdin.readline)).strip() == "go":
            bodies = bodies_of(rows, model, chance)
            print("sending", flush=True)
            await send_list(http, url, bodies)
            print("done", flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))

"""Run a command of this checkout in this process, whether or not the checkout is installed."""

from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np

from rooftune.policies.commands import COMMAND_GROUP
from rooftune.tuner.cli.main import main

POINTS = {
    name: EntryPoint(name, f"rooftune.tuner.cli.{name}:COMMAND", COMMAND_GROUP)
    for name in ("capacity", "recommend", "simulate", "sweep")
}
HEAD = "arrival_s,prompt_tokens,output_tokens,tenant\n"


def rooftune(*words: object) -> int:
    """Exit code of ``rooftune WORDS``; output goes where the process's goes."""
    return main([str(word) for word in words], POINTS)


def write_mix(path: Path, requests: int = 400, seed: int = 1) -> Path:
    """Chat of two tenants at 4 requests/s, one prompt in 20 long: enough that the budget matters."""
    chance = np.random.default_rng(seed)
    arrival_s = np.sort(chance.uniform(0.0, requests / 4, requests)).round(6)
    prompt = np.where(chance.random(requests) < 0.05, 20_000, chance.integers(100, 1500, requests))
    output = chance.integers(1, 200, requests)
    rows = (
        f"{a},{p},{o},{'gold' if index % 3 else 'basic'}\n"
        for index, (a, p, o) in enumerate(zip(arrival_s, prompt, output, strict=True))
    )
    path.write_text(HEAD + "".join(rows))
    return path

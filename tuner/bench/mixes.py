"""The traffic of the search's benches: three made mixes, and two public traces where they are beside the project.

Constants ``8b-2tbs``, KV 600,000 tokens, 256 sequences; a request is good with TTFT <= 2 s and at most 1 % of its own
gaps above 30 ms. Prompts 100 to 1,500 tokens, output exponential with mean 200, over 600 s.
"""

from collections.abc import Callable
from pathlib import Path

from rooftune.policies.request import Boot, Setting
from rooftune.policies.slo import Slo, Target
from rooftune.policies.step_time import NAMED_MODELS
from rooftune.tuner.sim.engine import Engine
from rooftune.tuner.traffic.generate import document_mix
from rooftune.tuner.traffic.reshape import scale_rate
from rooftune.tuner.traffic.traces import load_traffic
from rooftune.tuner.traffic.workload import Traffic

MODEL = NAMED_MODELS["8b-2tbs"]
ENGINE = Engine(Boot(16_384, 16, 1, 1, 0, 0), 600_000 // 16, 256)
SLO = Slo((Target("ttft", 2.0, 0.99), Target("gap", 0.03, 0.99)))
DEFAULT = Setting(2048, max_running=256)
TRACES = Path(__file__).resolve().parents[3] / "shared" / "data" / "traces"
AZURE_CONV = TRACES / "azure-2023-conv.csv"

SHOP = "chat with 1 in 8 documents"
BURSTS = "the same in bursts"
GIANTS = "chat with 1 in 30 giants"


def mix(name: str, span_s: float = 600.0) -> Traffic:
    """One of the three made mixes."""
    makers: dict[str, Callable[[], Traffic]] = {
        SHOP: lambda: document_mix(2, 4.0, span_s, 8, (16_000, 32_000)),
        BURSTS: lambda: document_mix(2, 3.0, span_s, 8, (16_000, 32_000), burst_cv=3.0),
        GIANTS: lambda: document_mix(2, 3.0, span_s, 30, (60_000, 100_000)),
    }
    return makers[name]()


def traces() -> dict[str, Traffic]:
    """azure-conv at 1.8x and azure-code at 0.7x; empty when the data is not beside the project."""
    found = {}
    for name, file, factor in (
        ("azure-conv at 1.8x", "azure-2023-conv.csv", 1.8),
        ("azure-code at 0.7x", "azure-2023-code.csv", 0.7),
    ):
        path = TRACES / file
        if path.is_file():
            found[name] = scale_rate(load_traffic(path), factor)
    return found

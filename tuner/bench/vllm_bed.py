"""A real vLLM server with our hook for the benches that need one, on a model made on the spot.

Needs the vLLM environment ($ROOFTUNE_VLLM_ENV, or .venv-vllm in the project); a bench without it is passed over. The
environment stays as it is: the hook is made visible by a folder of links with the metadata of this installation, as if
it had been installed there.
"""

import os
import secrets
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path

import httpx

from rooftune.policies.errors import MissingDataError, UnreachableError
from rooftune.policies.request import Setting
from rooftune.tuner.bench.children import (
    MAIN,
    PROJECT,
    Children,
    Served,
    link_packages,
    run_to_end,
    say,
    wait_for,
)
from rooftune.tuner.bench.live_gain_rounds import SERVED_NAME, Bed
from rooftune.tuner.ports.http import HttpPort, Timeouts

VARIABLE = "ROOFTUNE_VLLM_ENV"
MODEL_SIZE = "small"  # the smallest whose heads vLLM's CPU attention takes
MODEL_TOKENS = 4096
START_S, MAKE_S = 600.0, 300.0
# A step of a long prompt takes a while, and vLLM answers between two steps.
PATIENT = Timeouts(10.0, 60.0)
CPU_FLAGS = Path("/proc/cpuinfo")
# Either computes products in bfloat16; without them a bfloat16 model runs several times slower than one in float32.
BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})

# What vLLM itself gives a server on a CPU, and a sequence cap that leaves room below the budgets to be tried.
BOOT_TOKENS = 2048
MAX_RUNNING = 64
DEFAULT = Setting(BOOT_TOKENS, max_running=MAX_RUNNING)
FIRST_SPAN_S = 8.0


def vllm_python(environment: Mapping[str, str] = os.environ, project: Path = PROJECT) -> Path:
    """The interpreter of the vLLM environment. Raises MissingDataError when there is none."""
    folder = Path(environment.get(VARIABLE) or project / ".venv-vllm")
    python = folder / "bin" / "python"
    if not python.exists():
        raise MissingDataError(f"no vLLM environment at {folder}; run make vllm-env, or name one with {VARIABLE}")
    return python


def visible(folder: Path) -> Path:
    """``folder`` as an entry of PYTHONPATH with our packages and our entry points, and nothing else of ours."""
    ours = distribution("rooftune")
    info = folder / f"rooftune-{ours.version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: rooftune\nVersion: {ours.version}\n")
    groups: dict[str, list[str]] = {}
    for point in ours.entry_points:
        groups.setdefault(point.group, []).append(f"{point.name} = {point.value}")
    lines = [line for group, names in groups.items() for line in (f"[{group}]", *names)]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return link_packages(folder)


@dataclass(frozen=True)
class Ground:
    """Where the servers of a bench stand, one after the other. links: an entry of PYTHONPATH with our packages."""

    python: Path
    work: Path
    children: Children
    links: Path

    @property
    def model(self) -> Path:
        return self.work / "model"

    def make_model(self) -> None:
        """``rooftune make-model`` by vLLM's interpreter, which has the torch that it needs. Raises UnreachableError."""
        words = [str(self.python), "-m", MAIN, "make-model", str(self.model), "--size", MODEL_SIZE]
        say("making a model")
        run_to_end(self.children.run("make-model", words, self.environment), MAKE_S)

    @property
    def environment(self) -> dict[str, str]:
        """Of every process of vLLM.

        One thread computes, inside the engine's own process: a worker of its own would have the engine wait for it in a
        busy loop, on the core that vLLM's server process, the client and the controller need. (vLLM on a CPU insists on
        such a worker unless the second variable is 0; the server talks to its engine process in either case.)
        """
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "ROOFTUNE_"))}
        return kept | {
            "PYTHONPATH": str(self.links), "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1",
            "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CACHE_ROOT": str(self.links.parent / "vllm-cache"), "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip

    @contextmanager
    def bed(self, name: str) -> Iterator[Bed]:
        """A fresh server that answers. Raises UnreachableError with its last words."""
        folder = self.work / name
        folder.mkdir()
        token = folder / "token"
        token.write_text(secrets.token_hex(16))
        port = free_port()
        words = [str(self.python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.model)]
        words += ["--served-model-name", SERVED_NAME, "--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
        words += ["--max-model-len", str(MODEL_TOKENS), "--max-num-batched-tokens", str(BOOT_TOKENS)]
        words += ["--max-num-seqs", str(MAX_RUNNING), "--no-enable-prefix-caching", "--disable-uvicorn-access-log"]
        words += ["--dtype", cpu_dtype(), "--distributed-executor-backend", "uni"]
        environment = self.environment | {"VLLM_PLUGINS": "rooftune", "ROOFTUNE_TOKEN_FILE": str(token)}
        say(f"starting vLLM ({name})")
        child = self.children.run(f"vllm-{name}", words, environment, folder)
        url = f"http://127.0.0.1:{port}"
        with httpx.Client(timeout=5.0, trust_env=False) as http:
            if wait_for(child, lambda: _answers(http, url), START_S) is None:
                raise UnreachableError(f"vLLM did not come up: {child.last_words()}")
        bed = Bed(self.children, Served(child, url, url), HttpPort(url, token, PATIENT), folder)
        try:
            yield bed
        finally:
            bed.close()


@contextmanager
def open_ground(prefix: str) -> Iterator[Ground]:
    """A folder with a model, gone afterwards. Raises MissingDataError without a vLLM environment."""
    python = vllm_python()
    with tempfile.TemporaryDirectory(prefix=prefix) as folder, Children(Path(folder) / "logs") as children:
        ground = Ground(python, Path(folder), children, visible(Path(folder) / "links"))
        ground.make_model()
        yield ground


def cpu_dtype(flags_file: Path = CPU_FLAGS) -> str:
    """What vLLM is to compute in here: ``bfloat16``, or ``float32`` where the CPU does not say that it has it."""
    try:
        lines = flags_file.read_text().splitlines()
    except OSError:
        return "float32"
    flags = next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), [])
    return "float32" if BFLOAT16_FLAGS.isdisjoint(flags) else "bfloat16"


def _answers(http: httpx.Client, url: str) -> bool | None:
    try:
        return True if http.get(f"{url}/health").status_code == 200 else None
    except httpx.TransportError:
        return None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

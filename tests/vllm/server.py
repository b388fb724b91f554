"""A real vLLM server on a model made on the spot, with or without the plugin; nothing is installed for it.

The plugin is made visible by a folder on PYTHONPATH with the metadata that an installation would have, so that the
environment stays unchanged; where the project is installed, that metadata comes first and is the same.
"""

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from rooftune.policies import wire
from tests.links import import_path

ROOT = Path(__file__).resolve().parents[2]
START_S = 900.0  # a busy machine: 25 s when it is idle
TOKEN = "the-tuning-token-0123456789"
AUTH = {"Authorization": f"Bearer {TOKEN}"}

# Weights large enough that a random model does not repeat one token forever; float32, so that tokens can be compared.
MODEL = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
from rooftune.engine.torch.make_model import train_tokenizer
torch.manual_seed(7)
tokenizer = train_tokenizer(512, 1, 8192)
config = LlamaConfig(
    vocab_size=len(tokenizer), hidden_size=96, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=8192, initializer_range=0.3,
    pad_token_id=0, bos_token_id=1, eos_token_id=None,
)
LlamaForCausalLM(config).save_pretrained(sys.argv[1])
tokenizer.save_pretrained(sys.argv[1])
"""


def make_model(python: Path, folder: Path) -> None:
    """A few million random weights and a small tokenizer."""
    environment = os.environ | {"PYTHONPATH": import_path(), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [str(python), "-c", MODEL, str(folder)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]


def installed(folder: Path) -> Path:
    """What the metadata of an installed rooftune is: a folder for PYTHONPATH."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = folder / f"rooftune-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: rooftune\nVersion: {project['version']}\n")
    lines: list[str] = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder


@dataclass
class Server:
    """A running server. log: everything it has printed."""

    url: str
    process: subprocess.Popen[str]
    log: list[str]
    http: httpx.Client
    tuning_url: str = ""
    headers: dict[str, str] = field(default_factory=lambda: dict(AUTH))

    # --- the protocol ---

    def call(self, method: str, path: str, body: Any = None, **more: Any) -> httpx.Response:
        headers = more.pop("headers", self.headers)
        content = body if isinstance(body, bytes) else None if body is None else body.model_dump_json().encode()
        return self.http.request(method, f"{self.tuning_url}/tuning/v1{path}", content=content, headers=headers, **more)

    def tuning_state(self) -> wire.State:
        answer = self.call("GET", "/state")
        assert answer.status_code == 200, answer.text
        return wire.parse(wire.State, answer.content, wire.MAX_ANSWER_BYTES)

    def push(self, request: wire.PushRequest) -> wire.PushAnswer | wire.Refusal:
        answer = self.call("PUT", "/knobs", request)
        if answer.status_code == 200:
            return wire.parse(wire.PushAnswer, answer.content)
        refusal = wire.parse(wire.Refusal, answer.content)
        assert wire.REFUSAL_STATUS[refusal.code] == answer.status_code
        return refusal

    def revert(self, request: wire.RevertRequest) -> wire.PushAnswer:
        return wire.parse(wire.PushAnswer, self.call("DELETE", "/lease", request).content)

    def resume(self, request: wire.ResumeRequest) -> wire.PushAnswer:
        return wire.parse(wire.PushAnswer, self.call("POST", "/resume", request).content)

    def steps_after(self, after: int) -> wire.StepColumns:
        answer = self.call("GET", "/steps", params={"after": after})
        return wire.parse(wire.StepColumns, answer.content, wire.MAX_ANSWER_BYTES)

    def requests_after(self, after: int) -> wire.RequestColumns:
        answer = self.call("GET", "/requests", params={"after": after})
        return wire.parse(wire.RequestColumns, answer.content, wire.MAX_ANSWER_BYTES)

    def in_flight(self) -> wire.FlightColumns:
        return wire.parse(wire.FlightColumns, self.call("GET", "/in-flight").content, wire.MAX_ANSWER_BYTES)

    # --- load ---

    def complete(self, prompt: Sequence[int], tokens: int, **more: Any) -> list[int]:
        """The token ids of a greedy answer of exactly that length."""
        body = {
            "model": "mine", "prompt": list(prompt), "max_tokens": tokens, "temperature": 0.0, "ignore_eos": True,
            "return_token_ids": True,
        }  # fmt: skip
        answer = self.http.post(f"{self.url}/v1/completions", json=body | more)
        assert answer.status_code == 200, answer.text
        found = answer.json()["choices"][0]["token_ids"]
        assert len(found) == tokens
        return [int(token) for token in found]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(
    python: Path, model: Path, place: Path, *flags: str, plugin: bool = True, token: bool = True, **variables: str
) -> Iterator[Server]:
    """A server that answers. place: an empty folder of its own; variables: more environment."""
    port = free_port()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "ROOFTUNE_"))}
    environment |= {
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "DO_NOT_TRACK": "1",
        "VLLM_CACHE_ROOT": str(place.parent / "vllm-cache"), "PYTHONUNBUFFERED": "1", "VLLM_PLUGINS": "",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    if plugin:
        place.mkdir(parents=True, exist_ok=True)
        visible = installed(place / "installed")
        environment |= {"PYTHONPATH": f"{visible}:{import_path()}", "VLLM_PLUGINS": "rooftune"}
        if token:
            (place / "token").write_text(TOKEN + "\n")
            environment["ROOFTUNE_TOKEN_FILE"] = str(place / "token")
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name"]
    command += ["mine", "--port", str(port), "--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", "8192", "--max-num-batched-tokens", "2048", "--no-enable-prefix-caching", *flags]
    process = subprocess.Popen(
        command,
        env=environment | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=place.parent,
    )
    log: list[str] = []
    assert process.stdout is not None
    reader = threading.Thread(target=lambda: log.extend(iter(process.stdout.readline, "")), daemon=True)  # type: ignore[union-attr]
    reader.start()
    url = f"http://127.0.0.1:{port}"
    limits = httpx.Limits(max_connections=100)
    try:
        with httpx.Client(timeout=300.0, limits=limits) as http:
            server = Server(url, process, log, http, url)
            _wait(server)
            yield server
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        shutil.rmtree(place, ignore_errors=True)


def _wait(server: Server) -> None:
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s:
        if server.process.poll() is not None:
            raise AssertionError("the server ended:\n" + "".join(server.log[-60:]))
        try:
            if server.http.get(f"{server.url}/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.3)
    raise AssertionError("the server did not come up:\n" + "".join(server.log[-60:]))


if __name__ == "__main__":  # a look by hand: python -m tests.vllm.server VLLM_PYTHON FOLDER
    interpreter, folder = Path(sys.argv[1]), Path(sys.argv[2])
    if not (folder / "model").is_dir():
        make_model(interpreter, folder / "model")
    with serving(interpreter, folder / "model", folder / "place") as found:
        try:
            print("".join(line for line in found.log if "rooftune" in line))
            print(found.tuning_state())
            print(found.complete([5, 6, 7], 4))
            print(found.steps_after(-1))
            print(found.requests_after(-1))
        except AssertionError:
            print("".join(found.log[-100:]))
            raise

"""A live server on loopback over the real loop and a runner that computes tokens from seed and position alone."""

import asyncio
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from rooftune.engine.metrics import Metrics
from rooftune.engine.options import EngineOptions
from rooftune.engine.running import RunningEngine
from rooftune.engine.server.app import private_app, public_app
from rooftune.engine.server.limits import Limits
from rooftune.engine.server.openai import Service
from rooftune.engine.server.request import Served, Tokenizer
from rooftune.engine.server.run import bind_tcp, serve
from rooftune.engine.server.stream import ByteTokenizer
from rooftune.engine.server.tuning import SecretFile
from rooftune.engine.step import ModelFacts, StepBatch
from rooftune.policies.request import Setting

# One client for all: a new one reads the system's certificates, which takes longer than a hundred calls.
HTTP = httpx.Client(timeout=60)
EOS = 0
MODEL = "letters"


def letter(seed: int, position: int) -> int:
    """The token at ``position`` of a request with ``seed``: a small letter."""
    return 97 + (seed * 31 + position * position * 7 + position * 3) % 26


def letters(seed: int, prompt_tokens: int, count: int) -> str:
    return bytes(letter(seed, prompt_tokens + at) for at in range(count)).decode()


class LetterRunner:
    """Seeds from 1,000,000 on end their answer with EOS at the position ``seed - 1,000,000``."""

    def __init__(self, step_s: float = 0.0, *, kv_blocks: int = 4096, max_model_tokens: int = 2048) -> None:
        self.step_s = step_s
        self.gate = threading.Event()  # closed by a test that wants everything to wait
        self.gate.set()
        self.broken = False
        self.facts = ModelFacts(
            name=MODEL,
            parameters=1,
            vocab_tokens=512,
            max_model_tokens=max_model_tokens,
            dtype="float32",
            device="cpu",
            kv_blocks=kv_blocks,
            block_tokens=16,
            eos_token_ids=(EOS,),
        )

    def run(self, step: StepBatch) -> list[int]:
        self.gate.wait()
        if self.broken:
            raise RuntimeError("the test broke this runner")
        if self.step_s:
            time.sleep(self.step_s)
        return [self._token(part.sampling.seed, part.end) for part in step.segments if part.sample]

    def _token(self, seed: int, position: int) -> int:
        return EOS if seed >= 1_000_000 and position == seed - 1_000_000 else letter(seed, position)


class HeldTokenizer(ByteTokenizer):
    """Encodes nothing until it may."""

    def __init__(self) -> None:
        super().__init__(512)
        self.may = threading.Event()
        self.begun = 0

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        self.begun += 1
        assert self.may.wait(60)
        return super().encode(text)


@dataclass
class Live:
    """A running server. public and private: base URLs without a slash at the end."""

    runner: LetterRunner
    engine: RunningEngine
    metrics: Metrics
    public: str
    private: str
    thread: threading.Thread
    stop: "Stop"

    def idle(self) -> bool:
        """Whether the engine holds no request."""
        now = self.engine.snapshot()
        return now.running == 0 and now.waiting == 0

    def count_tasks(self) -> int:
        """Tasks alive on the server's event loop."""
        assert self.stop.loop is not None
        found: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.stop.loop.call_soon_threadsafe(lambda: found.put(len(asyncio.all_tasks())))
        return found.get(timeout=10)


class Stop:
    """The other thread's way to say SIGTERM."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self.signals: asyncio.Queue[int] | None = None

    def now(self) -> None:
        assert self.loop is not None and self.signals is not None
        self.loop.call_soon_threadsafe(self.signals.put_nowait, 15)


def soon(condition: "object", seconds: float = 20.0) -> bool:
    """Whether the callable ``condition`` becomes true; generous, because machines are busy."""
    assert callable(condition)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return bool(condition())


@contextmanager
def live(
    *,
    runner: LetterRunner | None = None,
    limits: Limits | None = None,
    max_queue: int = 1024,
    max_running: int = 64,
    step_tokens: int = 512,
    api_key: Path | None = None,
    tuning_token: Path | None = None,
    tokenizer: Tokenizer | None = None,
    client_s: float = 30.0,
    drain_s: float = 30.0,
) -> Iterator[Live]:
    """Serves until the block ends; fails when the server did not end cleanly."""
    runner = runner or LetterRunner()
    options = EngineOptions(Setting(step_tokens=step_tokens, max_running=max_running), max_queue=max_queue)
    engine = RunningEngine(runner, options)
    metrics = Metrics(engine.snapshot)
    engine.observe_with(metrics)
    tokenizer = tokenizer or ByteTokenizer(runner.facts.vocab_tokens)
    service = Service(
        engine=engine,
        served=Served(MODEL, engine.max_request_tokens, tokenizer, limits or Limits()),
        api_key=SecretFile(api_key) if api_key else None,
        on_rejected=metrics.on_rejected,
    )
    secret = SecretFile(tuning_token) if tuning_token else None
    sockets = [bind_tcp("127.0.0.1", 0, client_s) for _ in range(2)]
    listeners = [
        (public_app(service, metrics, secret), sockets[0]),
        (private_app(engine, metrics, secret), sockets[1]),
    ]
    stop, ready, problems = Stop(), threading.Event(), list[BaseException]()

    async def main() -> None:
        stop.loop, stop.signals = asyncio.get_running_loop(), asyncio.Queue()
        await serve(engine, listeners, stop.signals, drain_s, ready.set)

    def target() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:  # noqa: BLE001 - shown by the thread that can fail the test
            problems.append(error)

    thread = threading.Thread(target=target, daemon=True)
    urls = [f"http://127.0.0.1:{sock.getsockname()[1]}" for sock in sockets]
    thread.start()
    assert ready.wait(60), problems
    try:
        yield Live(runner, engine, metrics, urls[0], urls[1], thread, stop)
    finally:
        runner.gate.set()
        if thread.is_alive():
            stop.now()
        thread.join(60)
    assert not thread.is_alive(), "the server did not stop"
    if problems and not runner.broken:
        raise problems[0]

"""One replay from beginning to end: look at the server, make the prompts, send, ask the engine, give the rows."""

import asyncio
import resource
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass

import httpx
import numpy as np

from rooftune.policies.commands import Terminated
from rooftune.policies.errors import InputError, RooftuneError
from rooftune.tuner.replay.client import complete, completion_body, open_client, open_clients, served_model
from rooftune.tuner.replay.engine_side import EngineReader, match
from rooftune.tuner.replay.prompts import DEFAULT_VOCAB_TOKENS, PromptMaker
from rooftune.tuner.replay.result_file import ClientPart, EnginePart, RequestPart
from rooftune.tuner.replay.run import prepare_bodies, send_all
from rooftune.tuner.replay.stream import Flight
from rooftune.tuner.traffic.workload import Traffic

# Beyond these the client's times say more about the client than about the server.
LATE_P99_S = 0.02
SHARED_READS = 0.2
_LEAD_S = 0.05


@dataclass(frozen=True)
class Job:
    """What is asked for. model, vocab_tokens: None = what the server says. tuning_url: None = not asked.
    limit_s: longest time for one answer."""

    traffic: Traffic
    url: str
    seed: int
    limit_s: float
    model: str | None = None
    api_key: str | None = None
    vocab_tokens: int | None = None
    tuning_url: str | None = None
    tuning_token: str | None = None


@dataclass(frozen=True)
class Measured:
    """What came of it. unsent: requests that an interruption kept back. stop: that interruption, None for none."""

    model: str
    vocab_tokens: int
    rows: tuple[RequestPart, ...]
    unsent: int
    stop: KeyboardInterrupt | None
    engine: EnginePart | None
    engine_error: str | None


async def replay(job: Job, progress: Callable[[int], None], say: Callable[[str], None]) -> Measured:
    """Raises UnreachableError before the first request when no server answers; RefusedError for a wrong key."""
    async with open_clients(job.api_key) as clients, open_client(job.tuning_token) as tuning_http:
        served = await served_model(clients[0], job.url)
        model = job.model or served.name
        if model is None:
            raise InputError(f"{job.url} does not say what it serves; give the name with --model")
        vocab_tokens = job.vocab_tokens or served.vocab_tokens or DEFAULT_VOCAB_TOKENS
        _warn_too_long(job.traffic, served.max_tokens, say)
        say(f"{len(job.traffic):,} prompts of {int(job.traffic.prompt_tokens.sum()):,} tokens are being made")
        prompts = PromptMaker(job.traffic, vocab_tokens, job.seed)
        output = job.traffic.output_tokens.tolist()
        bodies = prepare_bodies(
            len(job.traffic), lambda index: completion_body(model, prompts.token_ids(index).tolist(), output[index])
        )
        _allow_many_connections()
        planned_s = job.traffic.arrival_s - job.traffic.arrival_s[0]
        async with _following(job, tuning_http) as reader:
            zero_s = time.monotonic() + _LEAD_S

            def since_start() -> float:
                return time.monotonic() - zero_s

            stop = asyncio.Event()

            async def send(flight: Flight, content: bytes) -> None:
                http = clients[flight.index % len(clients)]
                await complete(http, job.url, content, flight, since_start, job.limit_s)

            with _stop_on_signals(stop) as seen:
                flights = await send_all(planned_s, bodies, send, since_start, stop, progress)
        rows = tuple(_row(job.traffic, flight) for flight in flights)
        engine, engine_error = None, None
        if reader is not None:
            try:
                await reader.end(sum(row.failure is None for row in rows))
                engine = match(reader.pages, rows, reader.offset_s + zero_s)
            except RooftuneError as error:  # what the client saw must not be lost with it
                engine_error = str(error)
    unsent = len(job.traffic) - len(rows)
    return Measured(model, vocab_tokens, rows, unsent, seen[0] if seen else None, engine, engine_error)


def _row(traffic: Traffic, flight: Flight) -> RequestPart:
    at = flight.index
    tenant = traffic.tenant_names[int(traffic.tenant[at])]
    return flight.row(tenant, int(traffic.prompt_tokens[at]), int(traffic.output_tokens[at]))


def _allow_many_connections() -> None:
    """One socket a request under way; the usual soft limit of 1,024 files would look like a server that refuses."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _warn_too_long(traffic: Traffic, max_tokens: int | None, say: Callable[[str], None]) -> None:
    if max_tokens is None:
        return
    over = int((traffic.prompt_tokens + traffic.output_tokens > max_tokens).sum())
    if over:
        say(f"{over:,} of {len(traffic):,} requests are longer than the model's {max_tokens:,} tokens and will fail")


@asynccontextmanager
async def _following(job: Job, http: httpx.AsyncClient) -> AsyncIterator[EngineReader | None]:
    """The reader of the engine's rows, reading along; None when it was not asked for."""
    if job.tuning_url is None:
        yield None
        return
    reader = EngineReader(http, job.tuning_url, time.monotonic)
    await reader.begin()
    task = asyncio.create_task(reader.follow())
    try:
        yield reader
    finally:
        task.cancel()
        # A read that failed on the way is made again at the end, where its failure is told.
        with suppress(asyncio.CancelledError, RooftuneError):
            await task


@contextmanager
def _stop_on_signals(stop: asyncio.Event) -> Iterator[list[KeyboardInterrupt]]:
    """Ctrl-C and SIGTERM set ``stop`` instead of tearing down what has been measured; gives those that came."""
    loop, seen = asyncio.get_running_loop(), list[KeyboardInterrupt]()

    def end(kind: type[KeyboardInterrupt]) -> None:
        seen.append(kind())
        stop.set()

    before = {}
    for one, kind in ((signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)):
        handler = signal.getsignal(one)
        with suppress(NotImplementedError, RuntimeError, ValueError):  # no main thread, or no signals at all
            loop.add_signal_handler(one, end, kind)
            before[one] = handler
    try:
        yield seen
    finally:
        for one, handler in before.items():
            loop.remove_signal_handler(one)
            signal.signal(one, handler)


def client_part(rows: tuple[RequestPart, ...]) -> ClientPart:
    """How well the client kept its own times."""
    late_s = np.array([max(row.sent_s - row.planned_s, 0.0) for row in rows] or [0.0])
    p50, p99 = (float(np.quantile(late_s, q, method="higher")) for q in (0.5, 0.99))
    finished = [row for row in rows if row.failure is None]
    gaps = sum(len(row.gaps_s) for row in finished)
    shared = sum(row.gaps_s.count(0.0) for row in finished) / gaps if gaps else 0.0
    reasons = []
    if p99 > LATE_P99_S:
        reasons.append(f"1 % of the requests were sent more than {p99 * 1e3:.0f} ms late")
    if shared > SHARED_READS:
        reasons.append(f"{shared * 100:.0f} % of the tokens came in one read with the token before")
    return ClientPart(
        late_p50_s=p50,
        late_p99_s=p99,
        late_max_s=float(late_s.max()),
        shared_reads=shared,
        short_answers=sum(row.output_tokens < row.asked_tokens for row in finished),
        events_of_many=sum(len(row.gaps_s) + 1 < row.output_tokens for row in finished),
        bottleneck=tuple(reasons),
    )

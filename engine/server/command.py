"""What ``rooftune serve`` does: flags to a runner, an engine, its applications and their sockets."""

import argparse
import contextlib
import gc
import socket
import time
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rooftune.engine.fake import FAKE_FACTS, FakeRunner, ManualClock
from rooftune.engine.metrics import Metrics
from rooftune.engine.running import RunningEngine
from rooftune.engine.server import flags
from rooftune.engine.server.app import private_app, public_app
from rooftune.engine.server.openai import Service
from rooftune.engine.server.request import Served, Tokenizer
from rooftune.engine.server.run import address_of, bind_private, bind_tcp, run
from rooftune.engine.server.stream import ByteTokenizer
from rooftune.engine.server.tuning import SecretFile
from rooftune.engine.step import Runner
from rooftune.policies.errors import bad_value
from rooftune.policies.step_time import NAMED_MODELS

PREFIX = "fake:"
_MODEL_TOKENS = 131_072
_KV_BLOCKS = 8192
# Prompts use the lower half; the fake model's answers use the upper half.
_VOCAB_TOKENS = 1 << 18
FAKE_PROMPT_VOCAB_TOKENS = _VOCAB_TOKENS // 2


class WallClock(ManualClock):
    """A clock that sleeps to advance."""

    def __call__(self) -> float:
        return time.monotonic()

    def advance(self, seconds: float) -> None:
        time.sleep(seconds)


def fake_runner(source: str, kv_blocks: int | None, block_tokens: int) -> FakeRunner:
    """``fake:8b-2tbs`` and the like. Raises InputError for a step-time model without that name."""
    name = source.removeprefix(PREFIX)
    if name not in NAMED_MODELS:
        raise bad_value("fake model", source, " or ".join(PREFIX + known for known in NAMED_MODELS), "take one of them")
    facts = replace(FAKE_FACTS, name=source, vocab_tokens=_VOCAB_TOKENS, max_model_tokens=_MODEL_TOKENS)
    return FakeRunner(
        NAMED_MODELS[name],
        WallClock(),
        kv_blocks=kv_blocks or _KV_BLOCKS,
        block_tokens=block_tokens,
        facts=facts,
        read_all=False,
    )


def serve(arguments: argparse.Namespace) -> int:
    """Serves until a signal; 0 when everything in flight was answered. Raises RooftuneErrors."""
    # Everything that can be wrong and costs nothing comes before the model is loaded.
    limits, options = flags.limits(arguments), flags.options(arguments, _version())
    flags.check_doors(arguments)
    api_key, tuning_secret = flags.secret(arguments.api_key_file), flags.secret(arguments.tuning_token_file)
    blocks = arguments.kv_blocks
    with contextlib.ExitStack() as doors:
        public = doors.enter_context(bind_tcp(arguments.host, arguments.port, arguments.client_timeout))
        private = bind_private(doors, arguments.tuning_port, arguments.tuning_socket, arguments.client_timeout)
        runner, tokenizer = _model(arguments, blocks)
        engine = RunningEngine(runner, options)
        metrics = Metrics(engine.snapshot)
        engine.observe_with(metrics)
        name = arguments.served_name or Path(arguments.model).name or arguments.model
        service = Service(
            engine=engine,
            served=Served(name, engine.max_request_tokens, tokenizer, limits),
            api_key=api_key,
            on_rejected=metrics.on_rejected,
        )
        public_secret = tuning_secret if private is None else None
        listeners = [(public_app(service, metrics, public_secret), public)]
        if private is not None:
            listeners.append((private_app(engine, metrics, tuning_secret), private))
        print(_about(runner, options.setting.step_tokens), flush=True)
        # Objects that live as long as the server are left out of garbage collection: with torch loaded, one full
        # collection stops every stream for longer than a step.
        gc.collect()
        gc.freeze()
        ready = [f"model {name!r} answers at {address_of(public)}/v1", _tuning(public, private, tuning_secret)]
        run(engine, listeners, drain_s=arguments.drain, ready=lambda: print("\n".join(ready), flush=True))
    return 0


def _model(arguments: argparse.Namespace, blocks: int | None) -> tuple[Runner, Tokenizer]:
    if arguments.model.startswith(PREFIX):
        return fake_runner(arguments.model, blocks, arguments.block_tokens), ByteTokenizer(FAKE_PROMPT_VOCAB_TOKENS)
    # Here and not above: an engine without a model needs no torch, and importing it takes seconds.
    from rooftune.engine.torch.get_model import quiet
    from rooftune.engine.torch.load import ModelTokenizer, load_runner, load_tokenizer

    quiet()
    runner = load_runner(
        arguments.model,
        device=arguments.device,
        dtype=arguments.dtype,
        kv_blocks=blocks,
        block_tokens=arguments.block_tokens,
        max_running=arguments.max_running,
        max_model_tokens=arguments.max_model_tokens,
    )
    return runner, ModelTokenizer(load_tokenizer(arguments.model), runner.facts.vocab_tokens)


def _about(runner: Runner, step_tokens: int) -> str:
    facts = runner.facts
    millions = facts.parameters / 1e6
    size = f"{millions:,.0f}" if millions >= 10 else f"{millions:.2g}"
    weights = f"{size} million parameters in {facts.dtype} on " if facts.parameters else ""  # a fake model has none
    return f"{facts.name}: {weights}{facts.device}, {facts.kv_tokens} tokens of KV, budget {step_tokens} tokens a step"


def _tuning(public: socket.socket, private: socket.socket | None, secret: SecretFile | None) -> str:
    if private is None and secret is None:
        return "no tuning routes: give --tuning-token-file, or --tuning-port for read-only access"
    kind = "read-only, without a token" if secret is None else "read and write, with the token"
    return f"tuning protocol at {address_of(private or public)}/tuning/v1 ({kind})"


def _version() -> str:
    try:
        return version("rooftune")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "unknown"

"""The entry point ``vllm.general_plugins``: vLLM finds it by itself."""

import functools
import importlib
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from rooftune.engine.tuning_source import CHANGES, change, read
from rooftune.engine.vllm.hook import Hook, hooked
from rooftune.policies import wire
from rooftune.policies.errors import InputError

METHOD = "rooftune"

# Rows are written to JSON beside the engine's loop: a thousand of them take milliseconds.
_WRITER = ThreadPoolExecutor(1, thread_name_prefix="rooftune-rows")


def utility(core: Any, what: str, body: str) -> "list[int | str] | Future[list[int | str]]":
    """HTTP status and JSON text for a read (``body``: the number after which) or a change (``body``: its message).

    vLLM calls it by name, between two steps. It never raises because of a client's input.
    """
    hook: Hook | None = getattr(core.scheduler, "rooftune", None)
    if hook is None:
        return [503, "the hook is not active in this engine, see its log"]
    hook.fold()
    if what in CHANGES:
        try:
            status, text = change(hook.desk, wire.parse(CHANGES[what], body.encode()))
        except InputError as error:
            return [422, wire.malformed(hook.desk.book.revision, str(error)).model_dump_json()]
        return [status, text]
    if what == "state":
        return [200, read(hook.desk, what, -1)]
    if what == "in-flight":
        found = hook.in_flight()
        if found is None:
            return [503, "the requests in flight cannot be told, see the engine's log"]
        return _WRITER.submit(lambda: [200, hook.desk.in_flight(found).model_dump_json()])
    return _WRITER.submit(_rows, hook, what, int(body))


def _rows(hook: Hook, what: str, after: int) -> list[int | str]:
    if what == "requests":
        hook.recorder.close_all()
    return [200, read(hook.desk, what, after)]


_MARK = "_rooftune"


def register() -> None:
    """Called by vLLM in each of its processes, maybe more than once: from here on the scheduler it chooses is hooked.

    Only the engine's process ever chooses one; there, and not before, its utility method is added.
    """
    from vllm.config import SchedulerConfig

    if hasattr(SchedulerConfig, _MARK):
        return
    chosen = SchedulerConfig.get_scheduler_cls

    @functools.wraps(chosen)
    def get_scheduler_cls(self: Any) -> type:
        base: type = chosen(self)
        setattr(_module("vllm.v1.engine.core").EngineCore, METHOD, utility)
        return hooked(base, _version)

    SchedulerConfig.get_scheduler_cls = get_scheduler_cls
    setattr(SchedulerConfig, _MARK, True)


def _version() -> str:
    return str(_module("vllm").__version__)


def _module(name: str) -> Any:
    return importlib.import_module(name)

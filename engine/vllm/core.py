"""The tuning protocol inside vLLM's engine process: one utility method, text in and text out, called between steps."""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from rooftune.engine.tuning_source import CHANGES, change, read
from rooftune.engine.vllm.hook import Hook
from rooftune.policies import wire
from rooftune.policies.errors import InputError

METHOD = "rooftune"

# Rows are written to JSON beside the engine's loop: a thousand of them take milliseconds.
_WRITER = ThreadPoolExecutor(1, thread_name_prefix="rooftune-rows")


def utility(core: Any, what: str, body: str) -> "list[int | str] | Future[list[int | str]]":
    """HTTP status and JSON text for a read (``body``: the number after which) or a change (``body``: its message).

    vLLM calls it by name, between two steps. It never raises for what a client sent.
    """
    hook: Hook | None = getattr(core.scheduler, "rooftune", None)
    if hook is None:
        return [503, "the hook is not active in this engine, see its log"]
    hook.fold()
    if what in CHANGES:
        try:
            status, text = change(hook.desk, wire.parse(CHANGES[what], body.encode()))
        except InputError as error:
            revision = hook.desk.book.revision
            refusal = wire.Refusal(code="malformed", revision=revision, message=str(error)[:1000])
            return [422, refusal.model_dump_json()]
        return [status, text]
    if what == "state":
        return [200, read(hook.desk, what, -1)]
    return _WRITER.submit(_rows, hook, what, int(body))


def _rows(hook: Hook, what: str, after: int) -> list[int | str]:
    if what == "requests":
        hook.recorder.close_all()
    return [200, read(hook.desk, what, after)]

"""The entry point ``vllm.general_plugins``: vLLM finds it by itself."""

import functools
import importlib
from typing import Any

from rooftune.engine.vllm import core
from rooftune.engine.vllm.hook import hooked

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
        setattr(_module("vllm.v1.engine.core").EngineCore, core.METHOD, core.utility)
        return hooked(base, _version)

    SchedulerConfig.get_scheduler_cls = get_scheduler_cls
    setattr(SchedulerConfig, _MARK, True)


def _version() -> str:
    return str(_module("vllm").__version__)


def _module(name: str) -> Any:
    return importlib.import_module(name)

"""When two searches may share their trials: when the same setting has the same value in both."""

from collections.abc import Iterator
from dataclasses import fields
from hashlib import sha256
from typing import Any

import numpy as np
from rooftune.policies.request import Setting
from rooftune.policies.slo import Slo
from rooftune.policies.step_time import StepCost, StepModel
from rooftune.tuner.search.space import SearchSpace
from rooftune.tuner.sim.engine import Engine
from rooftune.tuner.sim.workload import Traffic


def study_key(
    name: str, seen: Traffic, space: SearchSpace, engine: Engine, model: StepModel | StepCost, slo: Slo
) -> str:
    """``name`` and a short sum of all that a value depends on; ``seen``: the traffic that trials run on.

    How far budgets and caps may go is left out: a wider or narrower range is the same study.
    """
    # What a trial draws by itself does not count, what it takes over from the base does.
    drawn = dict.fromkeys(space.knobs & {*Setting._fields}, 0)
    boot = engine.boot._replace(ceiling_tokens=0)
    digest = sha256(repr((space.base._replace(**drawn), boot, engine.kv_blocks, slo)).encode())
    outside = (engine.outside_first_s, engine.outside_token_s)
    columns = [getattr(seen, field.name) for field in fields(seen) if field.name not in ("name", "tenant_names")]
    for part in _flat((*columns, *outside, *model)):
        digest.update(part)
    return f"{name}/{digest.hexdigest()[:12]}"


def _flat(value: Any) -> Iterator[bytes]:
    if isinstance(value, tuple):
        for part in value:
            yield from _flat(part)
    else:
        yield np.asarray(value).tobytes()

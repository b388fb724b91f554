"""A kept setting without its trial: in force under the controller's lease, and in its memory."""

from typing import Any

from rooftune.policies import wire
from rooftune.policies.request import SHORTEST_FIRST, Setting
from rooftune.tuner.control.memory import Kept, Memory, Moved, Traffic, knobs_of, remember
from tests.control.doubles import Rig


def keep(run: Rig, setting: Setting, **known: Any) -> None:
    """Call before the first cycle. known: of ``Kept``, such as share and traffic."""
    order = wire.ShortestFirstOrder(kind="shortest_first", aging_s=setting.aging_s)
    engine = run.engine.running
    state = engine.tuning_state()
    push = wire.PushRequest(
        knobs=wire.Knobs(step_tokens=setting.step_tokens),
        order_policy=order if setting.order_policy == SHORTEST_FIRST else None,
        lease_s=3600.0,
        expected_revision=state.revision,
        actor="rooftune/one",
        reason="kept",
    )
    assert isinstance(engine.push(push), wire.PushAnswer)
    now = engine.tuning_state()
    kept = Kept(boot_id=now.boot_id, setting=knobs_of(setting), push_cycle=1, **known)
    remember(run.store, Memory(kept=kept, moved=Moved(boot_id=now.boot_id, at_s=now.now_s)))


def traffic(rate_rps: float, prompt_tokens: float, output_tokens: float, mean_tokens: float | None = None) -> Traffic:
    return Traffic(
        requests=100,
        rate_rps=rate_rps,
        prompt_p50_tokens=prompt_tokens,
        prompt_mean_tokens=prompt_tokens if mean_tokens is None else mean_tokens,
        prompt_spread=1.5,
        output_p50_tokens=output_tokens,
    )

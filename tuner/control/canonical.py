"""One value for settings that do the same: what a policy that is not in force would need does not count. Pure.

The protocol moves a policy as a whole, so an engine may keep the numbers of one that is no longer in force.
"""

from rooftune.policies.request import DEADLINE, FCFS, PRESSURE, STEP_TIME_TARGET, Setting

_DEFAULTS = Setting(step_tokens=1)
_TARGET = ("budget_target_s", "budget_floor_tokens")
_PRESSURE = ("pressure_tokens", "pressure_prefills")
_DEADLINE = ("ttft_target_s", "prefill_s_per_token")


def canonical(setting: Setting) -> Setting:
    """The setting with the numbers of policies that are not in force at their defaults."""
    idle: list[str] = []
    if setting.budget_policy != STEP_TIME_TARGET:
        idle += _TARGET
    if setting.budget_policy != PRESSURE:
        idle += _PRESSURE
    if setting.order_policy != DEADLINE:
        idle += _DEADLINE
    if setting.order_policy == FCFS:
        idle.append("aging_s")
    return setting._replace(**{name: getattr(_DEFAULTS, name) for name in idle})

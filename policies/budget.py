"""Budget policies: how many tokens a step may compute, from the running and waiting requests.

Pure functions, interpreted and compiled. The result never exceeds the boot ceiling. A policy that computes its budget
never starves prefills or decodes: it gives at least one token more than the due decodes.
"""

from rooftune.policies.request import FIXED_BUDGET, PRESSURE, STEP_TIME_TARGET, Boot, Setting
from rooftune.policies.step_time import StepModel, chunk_attention_work, step_time


def step_budget(
    setting: Setting,
    boot: Boot,
    model: StepModel,
    decodes: int,
    decode_context_tokens: int,
    prefills: int,
    first_prefill_computed: int,
) -> int:
    """Tokens this step may compute.

    decodes: running requests due one token; decode_context_tokens: KV entries they read; prefills: requests with prompt
    tokens left, running or waiting; first_prefill_computed: computed tokens of the first of those.
    """
    budget = setting.step_tokens
    if setting.budget_policy == PRESSURE:
        if prefills >= setting.pressure_prefills and decodes > 0 and setting.pressure_tokens < budget:
            budget = setting.pressure_tokens
    elif setting.budget_policy == STEP_TIME_TARGET and prefills > 0:
        floor = decodes + setting.budget_floor_tokens
        budget = within_time(
            model, setting.budget_target_s, budget, decodes, decode_context_tokens, first_prefill_computed
        )
        if budget < floor:
            budget = floor if floor < setting.step_tokens else setting.step_tokens
    if setting.budget_policy != FIXED_BUDGET and budget <= decodes:
        budget = decodes + 1
    return budget if budget < boot.ceiling_tokens else boot.ceiling_tokens


def within_time(
    model: StepModel, target_s: float, most: int, decodes: int, context_tokens: int, already_computed: int
) -> int:
    """Most tokens, 0..most, whose predicted step time stays at or under ``target_s`` (bisection; monotone)."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        chunk = middle - decodes if middle > decodes else 0
        predicted_s = step_time(
            model,
            middle,
            decodes + (1 if chunk > 0 else 0),
            context_tokens + (already_computed if chunk > 0 else 0),
            chunk_attention_work(chunk, already_computed),
        )
        if predicted_s <= target_s:
            low = middle
        else:
            high = middle - 1
    return low

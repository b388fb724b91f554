"""Flags of one setting: every live knob and policy, in the words of the glossary."""

import argparse

from rooftune.policies.errors import InputError
from rooftune.policies.request import DEADLINE, FCFS, FIXED_BUDGET, PRESSURE, SHORTEST_FIRST, STEP_TIME_TARGET, Setting
from rooftune.policies.step_time import StepModel
from rooftune.tuner.cli.flags.engine import CURRENT_BUDGET_TOKENS, MAX_ENGINE_TOKENS, parse_switch
from rooftune.tuner.cli.flags.values import flag_of, parse_count, parse_duration
from rooftune.tuner.sim.engine import Engine, check_setting

BUDGET_POLICIES = {"fixed": FIXED_BUDGET, "step-time-target": STEP_TIME_TARGET, "pressure": PRESSURE}
ORDER_POLICIES = {"fcfs": FCFS, "shortest-first": SHORTEST_FIRST, "deadline": DEADLINE}
# A flag that belongs to one policy only: given without it, it would silently do nothing.
_BUDGET_OWNED = {
    "budget_target": "step-time-target",
    "budget_floor": "step-time-target",
    "pressure_tokens": "pressure",
    "pressure_prefills": "pressure",
}


def add_setting_flags(parser: argparse.ArgumentParser) -> None:
    """All knobs; a cap of 0 is none."""
    group = parser.add_argument_group("setting (a cap of 0 is no cap)")
    group.add_argument("--step-tokens", metavar="N", help=f"token budget (default {CURRENT_BUDGET_TOKENS})")
    group.add_argument("--chunk-cap", metavar="N", help="most prompt tokens of one request per step (default 0)")
    group.add_argument("--adaptive-chunk-cap", metavar="on|off", help="raise it to budget // eligible requests")
    group.add_argument("--max-partial-prefills", metavar="N", help="most prompts half-read at once (default 0)")
    group.add_argument("--max-long-partial-prefills", metavar="N", help="the same, counting long prompts (default 0)")
    group.add_argument("--long-prompt-tokens", metavar="N", help="least tokens of a long prompt")
    group.add_argument("--pass-over-max", metavar="TIME", help="longest passing-over of a held prompt (default 30s)")
    group.add_argument("--max-running", metavar="N", help="most requests in a step (default: --max-seqs)")
    group.add_argument("--budget-policy", default="fixed", help=f"{', '.join(BUDGET_POLICIES)} (default fixed)")
    group.add_argument("--budget-target", metavar="TIME", help="step-time-target: predicted step time stays under it")
    group.add_argument("--budget-floor", metavar="N", help="step-time-target: least prompt tokens of a step")
    group.add_argument("--pressure-tokens", metavar="N", help="pressure: budget while prompts press")
    group.add_argument(
        "--pressure-prefills", metavar="N", help="pressure: waiting prompts that count as pressure (default 2)"
    )
    group.add_argument("--order", default="fcfs", help=f"{', '.join(ORDER_POLICIES)} (default fcfs)")
    group.add_argument("--aging", metavar="TIME", help="a request that waited this long goes first (default 10s)")
    group.add_argument("--ttft-target", metavar="TIME", help="deadline: first token within it")


def read_setting(args: argparse.Namespace, engine: Engine, model: StepModel) -> Setting:
    """One setting, inside the engine's envelope. Raises InputError."""
    budget_policy = _choice(args.budget_policy, "--budget-policy", BUDGET_POLICIES)
    order_policy = _choice(args.order, "--order", ORDER_POLICIES)
    for name, owner in _BUDGET_OWNED.items():
        if getattr(args, name) is not None and args.budget_policy != owner:
            raise InputError(f"{flag_of(name)} belongs to --budget-policy {owner}, not {args.budget_policy!r}; drop it")
    if args.ttft_target is not None and order_policy != DEADLINE:
        raise InputError(f"--ttft-target belongs to --order deadline, not {args.order!r}; drop it")
    if args.aging is not None and order_policy == FCFS:
        raise InputError("--aging belongs to --order shortest-first or deadline, not 'fcfs'; drop it")
    for owner, name in (("step-time-target", "budget_target"), ("pressure", "pressure_tokens")):
        if args.budget_policy == owner and getattr(args, name) is None:
            raise InputError(f"--budget-policy {owner} needs {flag_of(name)}; give it")
    if order_policy == DEADLINE and args.ttft_target is None:
        raise InputError("--order deadline needs --ttft-target; give it, such as 2s")
    setting = Setting(
        step_tokens=_count(args.step_tokens, "--step-tokens", CURRENT_BUDGET_TOKENS, low=1),
        chunk_cap_tokens=_count(args.chunk_cap, "--chunk-cap", 0),
        adaptive_chunk_cap=int(
            args.adaptive_chunk_cap is not None and parse_switch(args.adaptive_chunk_cap, "--adaptive-chunk-cap")
        ),
        max_partial_prefills=_count(args.max_partial_prefills, "--max-partial-prefills", 0),
        max_long_partial_prefills=_count(args.max_long_partial_prefills, "--max-long-partial-prefills", 0),
        long_prompt_tokens=_count(args.long_prompt_tokens, "--long-prompt-tokens", 0),
        pass_over_max_s=_time(args.pass_over_max, "--pass-over-max", 30.0),
        max_running=_count(args.max_running, "--max-running", engine.sequence_ceiling, low=1),
        budget_policy=budget_policy,
        budget_target_s=_time(args.budget_target, "--budget-target", 0.0),
        budget_floor_tokens=_count(args.budget_floor, "--budget-floor", 0),
        pressure_tokens=_count(args.pressure_tokens, "--pressure-tokens", 0),
        pressure_prefills=_count(args.pressure_prefills, "--pressure-prefills", 2, low=1),
        order_policy=order_policy,
        aging_s=_time(args.aging, "--aging", 10.0),
        ttft_target_s=_time(args.ttft_target, "--ttft-target", 0.0),
        # What a prompt token costs beyond the floor: the roofline's own slope.
        prefill_s_per_token=model.slope_s_per_token if order_policy == DEADLINE else 0.0,
    )
    _refuse_idle(args, setting)
    check_setting(setting, engine)
    return setting


def _refuse_idle(args: argparse.Namespace, setting: Setting) -> None:
    """Raises InputError for a knob that was given and can do nothing beside the others."""
    for name, value in (("pressure_tokens", setting.pressure_tokens), ("budget_floor", setting.budget_floor_tokens)):
        if value >= setting.step_tokens:
            bound = f"below the token budget ({setting.step_tokens})"
            raise InputError(f"{flag_of(name)} is {value}, must be {bound}; lower it or raise --step-tokens")
    caps = ("max_partial_prefills", "max_long_partial_prefills")
    idle = (
        ("adaptive_chunk_cap", setting.adaptive_chunk_cap, ("chunk_cap",), setting.chunk_cap_tokens),
        ("long_prompt_tokens", setting.long_prompt_tokens, caps[1:], setting.max_long_partial_prefills),
        ("pass_over_max", args.pass_over_max, caps, any(getattr(setting, cap) for cap in caps)),
    )
    for name, given, owners, owned in idle:
        if given and not owned:
            needed = " or ".join(map(flag_of, owners))
            raise InputError(f"{flag_of(name)} does nothing without {needed}; give that too, or drop it")
    if setting.max_long_partial_prefills and not setting.long_prompt_tokens:
        raise InputError(
            "--max-long-partial-prefills needs --long-prompt-tokens, from which on a prompt is long; give it, or "
            "--max-partial-prefills for all prompts"
        )


def _choice(text: str, what: str, known: dict[str, int]) -> int:
    if text not in known:
        raise InputError(f"{what} is {text!r}, must be one of {', '.join(known)}; choose one")
    return known[text]


def _count(text: str | None, what: str, default: int, *, low: int = 0) -> int:
    return default if text is None else parse_count(text, what, low=low, high=MAX_ENGINE_TOKENS)


def _time(text: str | None, what: str, default_s: float) -> float:
    return default_s if text is None else parse_duration(text, what)

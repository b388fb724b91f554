"""Flags of one setting: every live knob and policy, from the table of knobs."""

import argparse
from functools import partial

from rooftune.policies.envelope import KNOB, Knob, Number, Unit
from rooftune.policies.errors import InputError
from rooftune.policies.request import DEADLINE, Setting
from rooftune.policies.step_time import StepModel
from rooftune.tuner.cli.flags.engine import CURRENT_BUDGET_TOKENS, MAX_ENGINE_TOKENS, parse_switch
from rooftune.tuner.cli.flags.values import add_value, parse_choice, parse_count, parse_duration, parse_number
from rooftune.tuner.sim.engine import Engine, check_setting

_FLAGGED = tuple(knob for knob in KNOB.values() if knob.flag)
_METAVARS = {
    Unit.COUNT: "N",
    Unit.SWITCH: "on|off",
    Unit.SECONDS: "TIME",
    Unit.SHARE: "SHARE",
    Unit.TOKENS_PER_SECOND: "RATE",
}
_OTHER_DEFAULTS = {"step_tokens": str(CURRENT_BUDGET_TOKENS), "max_running": "--max-seqs"}


def add_setting_flags(parser: argparse.ArgumentParser) -> None:
    """All knobs; a cap of 0 is none."""
    group = parser.add_argument_group("setting (a cap of 0 is no cap)")
    for knob in _FLAGGED:
        about = ", ".join(_kinds(knob)) if knob.choices else knob.help
        default = _default_words(knob)
        words = f"{about} (default {default})" if default else about
        add_value(group, f"--{knob.flag}", partial(_parse, knob), _METAVARS.get(knob.unit), words)


def given_knobs(args: argparse.Namespace) -> dict[str, Number]:
    """The knobs that were given, by name."""
    values = {knob.name: getattr(args, knob.flag.replace("-", "_")) for knob in _FLAGGED}
    return {name: value for name, value in values.items() if value is not None}


def read_setting(args: argparse.Namespace, engine: Engine, model: StepModel) -> Setting:
    """One setting, inside the engine's envelope. Raises InputError."""
    given = given_knobs(args)
    values: dict[str, Number] = {"step_tokens": CURRENT_BUDGET_TOKENS, "max_running": engine.sequence_ceiling}
    setting = Setting(**(values | given))  # type: ignore[arg-type]  # each of its unit
    _check_given(given, setting)
    if setting.order_policy == DEADLINE:  # what a prompt token costs beyond the floor: the roofline's own slope
        setting = setting._replace(prefill_s_per_token=model.slope_s_per_token)
    check_setting(setting, engine)
    return setting


def _check_given(given: dict[str, Number], setting: Setting) -> None:
    """Raises InputError for a knob that was given and can do nothing beside the others, or is missing beside them."""
    for knob in _FLAGGED:
        if knob.name in given and (knob.policy or getattr(setting, knob.name)) and not knob.acts(setting):
            raise InputError(f"--{knob.flag} {_idle_words(knob, setting)}")
        if knob.needed and knob.acts(setting) and not getattr(setting, knob.name):
            raise InputError(f"{_owner_words(knob, setting)} needs --{knob.flag}, {knob.help}; give it")
    for name in ("pressure_tokens", "budget_floor_tokens"):
        if getattr(setting, name) >= setting.step_tokens:
            value, bound = getattr(setting, name), f"below the token budget ({setting.step_tokens})"
            raise InputError(f"--{KNOB[name].flag} is {value}, must be {bound}; lower it or raise --step-tokens")


def _idle_words(knob: Knob, setting: Setting) -> str:
    if knob.policy is None:
        needed = " or ".join(f"--{KNOB[name].flag}" for name in knob.beside)
        return f"does nothing without {needed}; give that too, or drop it"
    owner, kinds = KNOB[knob.policy], _kinds(KNOB[knob.policy])
    chosen = kinds[getattr(setting, knob.policy)]
    return f"belongs to --{owner.flag} {' or '.join(kinds[value] for value in knob.under)}, not {chosen!r}; drop it"


def _owner_words(knob: Knob, setting: Setting) -> str:
    if knob.policy is None:
        return " or ".join(f"--{KNOB[name].flag}" for name in knob.beside)
    return f"--{KNOB[knob.policy].flag} {_kinds(KNOB[knob.policy])[getattr(setting, knob.policy)]}"


def _kinds(knob: Knob) -> list[str]:
    return [choice.kind.replace("_", "-") for choice in knob.choices]


def _default_words(knob: Knob) -> str:
    """Nothing for a knob that has to be stated where it acts."""
    value = Setting._field_defaults.get(knob.name)
    if knob.name in _OTHER_DEFAULTS or knob.needed or value is None:
        return _OTHER_DEFAULTS.get(knob.name, "")
    if knob.choices:
        return _kinds(knob)[value]
    return f"{value:g}s" if knob.unit is Unit.SECONDS else "off" if knob.unit is Unit.SWITCH else f"{value}"


def _parse(knob: Knob, text: str, what: str) -> Number:
    if knob.choices:
        return _kinds(knob).index(parse_choice(text, what, _kinds(knob)))
    if knob.unit is Unit.SWITCH:
        return int(parse_switch(text, what))
    if knob.unit is Unit.COUNT:
        return parse_count(text, what, low=int(knob.least), high=MAX_ENGINE_TOKENS)
    if knob.unit in (Unit.SHARE, Unit.TOKENS_PER_SECOND):
        return parse_number(text, what, low=knob.least, high=knob.most(0, 0))
    return parse_duration(text, what)

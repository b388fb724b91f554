"""The doctor at a vLLM environment: what it needs to carry the hook, and the line that loads it. Runs nothing of it."""

from collections.abc import Iterator

from rooftune.tuner.cli.doctor.finding import Check, Finding, bad, note, ok
from rooftune.tuner.ports.vllm.env import HOOK, VARIABLE, VllmEnv
from rooftune.tuner.ports.vllm.versions import Hook, capabilities

_PYTHON = (3, 11)


def env_findings(env: VllmEnv, in_force: str | None) -> Iterator[Finding]:
    """in_force: VLLM_PLUGINS of the server now, None: not set."""
    yield from _versions(env)
    yield from _plugins(env, in_force)


def _versions(env: VllmEnv) -> Iterator[Finding]:
    if env.python is not None and env.python < _PYTHON:
        yield bad(Check.PYTHON, f"Python {env.python[0]}.{env.python[1]}", "rooftune needs 3.11 or later")
    if not env.vllm:
        yield bad(Check.VLLM, "no vLLM is installed there", "give the environment that the server runs in")
    else:
        able = capabilities(env.version)
        text = f"vLLM {env.vllm}"
        if able.hook is Hook.NONE:
            yield bad(Check.VLLM, f"{text} has no endpoint plugins: no hook is possible", "use 0.27 or later")
        elif able.hook is Hook.READ_ONLY:
            yield note(Check.VLLM, f"we have not checked {text}: the hook is read-only there", "use 0.27 to 0.32")
        else:
            yield ok(
                Check.VLLM, text + ("" if able.tried else ": source checked, not run (0.32 is the version tested)")
            )
    if not env.rooftune:
        install = f"{env.folder}/bin/python -m pip install --no-deps ."  # + text: "in a checkout of Rooftune"
        yield bad(Check.ROOFTUNE, "rooftune is not installed there", f"run: {install}  (its base touches no pin)")
    elif not env.hooked:
        yield bad(Check.ROOFTUNE, f"rooftune {env.rooftune} there brings no hook", "install this release")
    else:
        yield ok(Check.ROOFTUNE, f"rooftune {env.rooftune} with the hook")


def _plugins(env: VllmEnv, in_force: str | None) -> Iterator[Finding]:
    others = [plugin for plugin in env.plugins if plugin.name != HOOK]
    for plugin in others:
        yield note(Check.PLUGINS, f"{plugin.name} ({plugin.group}, of {plugin.distribution})")
    for plugin in env.newly_on(in_force):
        text = f"the line also switches on the routes of {plugin.name} (of {plugin.distribution}), off until now"
        yield note(Check.PLUGINS, text, "leave its name out if you do not want them")
    if in_force is not None and HOOK in [name.strip() for name in in_force.split(",")]:
        yield ok(Check.PLUGINS, f"{VARIABLE} names the hook already")
    else:
        now = "not set" if in_force is None else f"{in_force!r}"
        yield note(Check.PLUGINS, f"{VARIABLE} is {now}", "start the server with the line at the end")

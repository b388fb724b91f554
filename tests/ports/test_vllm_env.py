"""A vLLM environment read from its files: the allowlist keeps what is in use, nothing is run."""

import tomllib
from pathlib import Path

import pytest

from rooftune.policies.errors import InputError
from rooftune.tuner.ports.vllm.env import Plugin, VllmEnv, read_env

HOOK_POINTS = (
    "[vllm.general_plugins]\nrooftune = rooftune.engine.vllm.plugin:register\n[vllm.endpoint_plugins]\nrooftune = e:P\n"
)


class Env:
    """A folder that looks like an environment."""

    def __init__(self, folder: Path, python: str = "python3.12") -> None:
        self.folder = folder
        self.site = folder / "lib" / python / "site-packages"
        self.site.mkdir(parents=True)

    def install(self, name: str, version: str = "1.0", points: str = "", files: tuple[str, ...] = ()) -> None:
        info = self.site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        if points:
            (info / "entry_points.txt").write_text(points)
        for file in files:
            (self.site / file).parent.mkdir(parents=True, exist_ok=True)
            (self.site / file).write_text("raise SystemExit('the doctor ran this')")
        (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))

    def read(self) -> VllmEnv:
        return read_env(self.folder)


@pytest.fixture
def env(tmp_path: Path) -> Env:
    found = Env(tmp_path / "env")
    points = "[vllm.general_plugins]\nlora = vllm.lora:f\n[console_scripts]\nvllm = vllm.main:main\n"
    found.install("vllm", "0.32.0+cpu", points, ("vllm/__init__.py",))
    return found


def test_versions_and_python_are_read(env: Env) -> None:
    found = env.read()
    assert (found.vllm, found.rooftune, found.python) == ("0.32.0+cpu", "", (3, 12))
    assert found.version is not None and found.version.minor == 32 and not found.hooked
    assert found.plugins == (Plugin("lora", "vllm.general_plugins", "vllm"),)


def test_the_plugins_line_names_every_plugin_in_use_and_the_hook(env: Env) -> None:
    env.install("their-cards", points="[vllm.platform_plugins]\ncard = c:f\n")
    env.install(
        "their-stats", points="[vllm.stat_logger_plugins]\nstats = s:S\n[vllm.io_processor_plugins]\nio = i:I\n"
    )
    env.install("their-routes", points="[vllm.endpoint_plugins]\nroutes = r:R\n")
    env.install("rooftune", "0.1.0", HOOK_POINTS)
    found = env.read()
    assert found.hooked and found.rooftune == "0.1.0"
    assert found.allowlist(None) == ("card", "io", "lora", "stats", "rooftune"), "routes are off unless they are named"
    assert found.newly_on(None) == ()


def test_an_existing_allowlist_is_kept(env: Env) -> None:
    found = env.read()
    assert found.allowlist("theirs, mine") == ("theirs", "mine", "rooftune")
    assert found.allowlist("") == ("rooftune",), "set to nothing: all are off, and stay off"
    assert found.allowlist("rooftune,theirs,theirs") == ("theirs", "rooftune")
    assert found.newly_on("lora") == ()


def test_routes_sharing_a_name_with_a_plugin_in_use_are_switched_on(env: Env) -> None:
    env.install("both", points="[vllm.general_plugins]\nboth = b:f\n[vllm.endpoint_plugins]\nboth = b:R\n")
    assert env.read().newly_on(None) == (Plugin("both", "vllm.endpoint_plugins", "both"),)


def test_broken_metadata_of_others_hides_only_its_own(env: Env) -> None:
    env.install("broken", points="not an ini file\n= = =\n[")
    (env.site / "nothing-1.0.dist-info").mkdir()
    assert env.read().allowlist(None) == ("lora", "rooftune")


def test_names_of_others_are_printable(env: Env) -> None:
    env.install("odd", points="[vllm.general_plugins]\na\x1b[31mb = o:f\n")
    assert all(plugin.name.isprintable() for plugin in env.read().plugins)


def test_the_hook_is_registered_in_both_groups_under_the_name_that_the_line_gives() -> None:
    """As installed here; a rename on either side would leave operators with a line that loads nothing."""
    points = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["entry-points"]
    for group in ("vllm.general_plugins", "vllm.endpoint_plugins"):
        assert list(points[group]) == ["rooftune"]


@pytest.mark.parametrize("place", [".", "nothing"])
def test_a_folder_that_is_not_an_environment_is_refused(place: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="site-packages"):
        read_env(tmp_path / place)

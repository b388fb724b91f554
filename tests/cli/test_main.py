"""The command's frame: exit codes, one line per error, lazy commands."""

import argparse
import json
import os
import signal
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from rooftune.policies.commands import COMMAND_GROUP, EXIT_INTERRUPTED, Command
from rooftune.policies.errors import InfeasibleError, InputError, UnreachableError
from rooftune.tuner.cli.main import EXIT_DEFECT, main, missing_extra
from rooftune.tuner.report.build import traffic_part
from rooftune.tuner.traffic.traces import load_traffic

ERRORS: dict[str, BaseException | int] = {
    "done": 0,
    "refused": 1,
    "input": InputError("--rate is -1,\nmust be > 0; give a positive rate"),
    "infeasible": InfeasibleError("no budget meets the target"),
    "unreachable": UnreachableError("http://x did not answer"),
    "defect": ZeroDivisionError("oops"),
    "interrupt": KeyboardInterrupt(),
    "torch-missing": ModuleNotFoundError("No module named 'torch'", name="torch"),
    "own-missing": ModuleNotFoundError("No module named 'rooftune.tuner.nowhere'", name="rooftune.tuner.nowhere"),
}


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=ERRORS)


def _run(arguments: argparse.Namespace) -> int:
    outcome = ERRORS[arguments.what]
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


FAKE = Command("fake", "does what it is told", _add_arguments, _run)
POINTS = {"fake": EntryPoint("fake", f"{__name__}:FAKE", COMMAND_GROUP)}


@pytest.mark.parametrize(
    ("what", "code", "words"),
    [
        ("done", 0, ""),
        ("refused", 1, ""),
        ("input", 2, "rooftune: --rate is -1, must be > 0; give a positive rate"),
        ("infeasible", 1, "rooftune: no budget meets the target"),
        ("unreachable", 3, "rooftune: http://x did not answer"),
        ("interrupt", EXIT_INTERRUPTED, "rooftune: interrupted"),
        ("torch-missing", 2, "pip install -e '.[tuner]'"),
        ("defect", EXIT_DEFECT, "ROOFTUNE_TRACE=1"),
        ("own-missing", EXIT_DEFECT, "defect: ModuleNotFoundError"),
    ],
)
def test_outcome_becomes_code_and_one_line(
    what: str, code: int, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ROOFTUNE_TRACE", raising=False)
    assert main(["fake", what], POINTS) == code
    output = capsys.readouterr().err
    assert words in output
    assert output.count("\n") == (1 if words else 0)


def test_trace_shows_where_a_defect_arose(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOFTUNE_TRACE", "1")
    assert main(["fake", "defect"], POINTS) == EXIT_DEFECT
    assert "in _run" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["fake"], ["fake", "nonsense"], ["fake", "done", "--more"], ["fak"], ["--loud"]])
def test_usage_error_is_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words, POINTS) == 2
    assert capsys.readouterr().err


def test_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fkae"], POINTS) == 2
    assert "did you mean 'fake'" in capsys.readouterr().err


def test_missing_library_names_the_extra(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "engine_less.py").write_text("import surely_not_installed\n")
    sys.path.insert(0, str(tmp_path))
    try:
        points = {"serve": EntryPoint("serve", "engine_less:SERVE", COMMAND_GROUP)}
        assert main(["serve"], points) == 2
    finally:
        sys.path.remove(str(tmp_path))
    assert capsys.readouterr().err == (
        "rooftune: 'serve' needs the module 'surely_not_installed'; in the checkout, run: pip install -e '.[tuner]'\n"
    )


def test_overview_reads_help_without_importing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "heavy_command.py").write_text(
        "raise RuntimeError('imported')\n"
        "COMMAND = Command('a', 'first help', f, g)\n"
        "OTHER = Command(help='second help')\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        points = {
            "a": EntryPoint("a", "heavy_command:COMMAND", COMMAND_GROUP),
            "b": EntryPoint("b", "heavy_command:OTHER", COMMAND_GROUP),
            "gone": EntryPoint("gone", "not_there.at_all:COMMAND", COMMAND_GROUP),
        }
        assert main(["--help"], points) == 0
    finally:
        sys.path.remove(str(tmp_path))
    shown = capsys.readouterr().out
    assert "first help" in shown
    assert "second help" in shown
    assert "gone" in shown


def test_every_installed_command_has_a_help_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out.partition("commands")[2].partition("exit codes")[0].splitlines()[1:]
    lines = [line.split() for line in listed if line.strip()]
    assert ["bench"] == [words[0] for words in lines if words[0] == "bench"]
    assert all(len(words) > 2 for words in lines), listed


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_overview_imports_nothing_heavy(flag: str) -> None:
    program = (
        "import sys; from rooftune.tuner.cli.main import main; main([sys.argv[1]]);"
        "print(sorted({'numba', 'optuna', 'torch', 'matplotlib', 'numpy', 'pydantic'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program, flag], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_closed_pipe_is_quiet() -> None:
    program = "import sys; from rooftune.tuner.cli.main import main; sys.exit(main(['--help']))"
    command = f"'{sys.executable}' -c \"{program}\" | true; echo ${{PIPESTATUS[0]}}"
    for _ in range(3):  # `true` may read nothing before it ends, or end too late to be noticed
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
        assert done.stdout.strip() in ("0", "141")
        assert done.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_full_disk_is_one_line_and_3(unbuffered: str) -> None:
    program = "import sys; from rooftune.tuner.cli.main import main; sys.exit(main(['--help']))"
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", program],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env=environment,
        )
    assert done.returncode == 3
    assert done.stderr.startswith("rooftune: output: No space left")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("library", "module", "extra"),
    [
        ("torch", "rooftune.engine.cli", "engine"),
        ("numba", "rooftune.tuner.cli.recommend", "tuner"),
        ("sched_sim", "rooftune.tuner.x", "dev"),
    ],
)
def test_extra_follows_the_side_of_the_command(library: str, module: str, extra: str) -> None:
    error = ModuleNotFoundError(f"No module named {library!r}", name=f"{library}.inner")
    explained = missing_extra(error, EntryPoint("it", f"{module}:COMMAND", COMMAND_GROUP))
    assert isinstance(explained, InputError)
    assert f"'.[{extra}]'" in str(explained)


def test_a_wrong_flag_is_one_line_that_names_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--no-such-flag"]) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1
    assert "--no-such-flag" in output.err and "rooftune bench --help" in output.err


def test_the_extra_of_the_server_is_named_for_what_only_the_server_needs() -> None:
    point = EntryPoint("serve", "rooftune.engine.cli:SERVE", COMMAND_GROUP)
    for module, extra in (("prometheus_client", "serve"), ("torch", "engine")):
        explained = missing_extra(ModuleNotFoundError(name=module), point)
        assert explained is not None and f"'.[{extra}]'" in str(explained)


def test_sigterm_cleans_up_like_ctrl_c(tmp_path: Path) -> None:
    code = (
        "import signal, sys, time, os, threading; from rooftune.tuner.cli import main as m\n"
        "from rooftune.tuner.report.folder import report_folder; from pathlib import Path\n"
        f"out = Path({str(tmp_path / 'out')!r})\n"
        "def work(words, points):\n"
        "    with report_folder(out):\n"
        "        os.kill(os.getpid(), signal.SIGTERM); time.sleep(20)\n"
        "m._dispatch = work; sys.exit(m.main())"
    )
    root = Path(__file__).resolve().parents[2]
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, timeout=60)
    assert ended.returncode == 143 and ended.stderr == "rooftune: terminated\n"
    assert not (tmp_path / "out").exists()


CALL = "import sys; from rooftune.tuner.cli.main import main; sys.argv[1:] = {words!r}; sys.exit(main())"


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(("words", "code"), [(["--help"], 0), (["--loud"], 2), (["bench", "--list"], 0)])
def test_closed_streams_are_replaced_by_devnull(words: list[str], code: int, closed: str) -> None:
    command = f'"$0" -c "$1" {closed}'
    program = [sys.executable, CALL.format(words=words)]
    done = subprocess.run(["bash", "-c", command, *program], capture_output=True, text=True, check=False)
    assert (done.returncode, "rooftune: defect" in done.stdout + done.stderr) == (code, False)
    assert bool(done.stdout) == (code == 0 and closed == "2>&-")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_an_unprintable_error_keeps_its_code() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", CALL.format(words=["--loud"])], stderr=full, check=False)
    assert done.returncode == 2


def test_an_unencodable_character_becomes_a_json_escape() -> None:
    program = "from rooftune.tuner.cli import main as m; import sys\n" + (
        "m._dispatch = lambda words, points: print('\"\\u2192\\xb1\\U0001f600\"') or 0; sys.exit(m.main())"
    )
    plain = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, env=plain, check=True)
    assert json.loads(done.stdout) == "\u2192\xb1\U0001f600" and done.stderr == b""


def test_a_negative_value_is_refused_by_its_own_bound(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--rate", "3", "--span", "-1s", "--out", "unused.csv"]) == 2
    assert "--span is '-1s', must be above 0" in capsys.readouterr().err


def test_generated_traffic_is_summarised_like_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mix.csv"
    words = ["--rate", "3", "--span", "60s", "--long", "1/30:60000-100000", "--seed", "2", "--json"]
    assert main(["generate", *words, "--out", str(path)]) == 0
    output = json.loads(capsys.readouterr().out)
    part = traffic_part(load_traffic(path), ())
    for name in ("prompt_p50_tokens", "prompt_p99_tokens", "output_p50_tokens", "output_p99_tokens"):
        assert output[name] == getattr(part, name), name


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", EXIT_INTERRUPTED)])
def test_a_signal_inside_a_finalizer_ends_the_command_all_the_same(name: str, code: int, tmp_path: Path) -> None:
    """Python drops whatever is raised there."""
    (tmp_path / "lossy.py").write_text(
        "import signal, sys, time\n"
        "from rooftune.tuner.cli import main as entry\n"
        "class Lossy:\n"
        f"    def __del__(self): signal.raise_signal(signal.{name}); time.sleep(0)\n"
        "def dispatch(words, points):\n"
        "    Lossy()\n"
        "    time.sleep(30)\n"
        "    return 0\n"
        "entry._dispatch = dispatch\n"
        "sys.exit(entry.main())\n"
    )
    done = subprocess.run([sys.executable, tmp_path / "lossy.py"], capture_output=True, text=True, timeout=25)
    assert done.returncode == code
    assert done.stderr.splitlines() == ["rooftune: " + ("terminated" if code == 143 else "interrupted")]


def _at_once(words: list[str], lines: str) -> subprocess.CompletedProcess[str]:
    """The installed command's first lines, after others."""
    root = Path(__file__).resolve().parents[2]
    scripts = tomllib.loads((root / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["rooftune"].partition(":")
    program = f"{lines}\nimport sys\nfrom {module} import {function}\nsys.argv[1:] = {words!r}\nsys.exit({function}())"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=root, timeout=60)


PRESSED = """
import signal, sys
class Press:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Press())
"""


@pytest.mark.parametrize(
    "name",
    [
        "rooftune.tuner.cli.main",
        "rooftune.policies.commands",
        "rooftune.tuner.cli.output",
        "rooftune.tuner.cli.simulate",
    ],
)
def test_ctrl_c_during_imports_is_one_line(name: str) -> None:
    done = _at_once(["simulate", "--help"], PRESSED.format(name=name))
    assert (done.returncode, done.stderr, done.stdout) == (EXIT_INTERRUPTED, "rooftune: interrupted\n", "")


def test_an_ignored_ctrl_c_stays_ignored() -> None:
    done = _at_once(
        ["--version"],
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)" + PRESSED.format(name="rooftune.tuner.cli.main"),
    )
    assert done.returncode == 0 and done.stderr == ""


def test_a_second_ctrl_c_while_the_first_is_handled_prints_nothing() -> None:
    twice = (
        "import signal, rooftune.tuner.cli.main as inner\n"
        "def press(*_): signal.raise_signal(signal.SIGINT)\n"
        "inner._dispatch, inner._fail = press, press"
    )
    done = _at_once(["--version"], twice)
    assert (done.returncode, done.stderr, done.stdout) == (EXIT_INTERRUPTED, "", "")


def test_a_second_ctrl_c_at_exit_prints_nothing() -> None:
    lines = "import atexit, signal; atexit.register(signal.raise_signal, signal.SIGINT)"
    done = _at_once(["--version"], lines)
    assert done.returncode == -signal.SIGINT and done.stderr == "" and done.stdout.startswith("rooftune ")

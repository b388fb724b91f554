"""The frame of the command ``rooftune``: finds the subcommand, runs it, turns errors into one line and a code.

Exit codes: 0 done, 1 refused or infeasible, 2 usage or input, 3 unreachable, 70 a defect of ours,
130 interrupted, 143 terminated, 141 the reader of our output went away.
"""

import argparse
import ast
import codecs
import difflib
import errno
import importlib.util
import io
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import EntryPoint, entry_points, version
from pathlib import Path
from threading import Timer
from types import FrameType
from typing import NoReturn

from rooftune.policies.commands import COMMAND_GROUP, Command, Terminated, exit_code_of
from rooftune.policies.errors import InputError, RooftuneError, UnreachableError

_OWN_PACKAGES = frozenset({"rooftune"})
_DEV_ONLY = ("sched_sim", "scipy")  # baselines of benchmarks
_SERVER_ONLY = {"prometheus_client", "jinja2"}


def registered(group: str) -> dict[str, EntryPoint]:
    """Entry points of ``group`` by name, in the order of their names."""
    return {point.name: point for point in sorted(entry_points(group=group), key=lambda point: point.name)}


def find(name: str, points: dict[str, EntryPoint], what: str) -> EntryPoint:
    """The entry point ``name``; an unknown name is an ``InputError`` that lists the known ones."""
    if name in points:
        return points[name]
    close = difflib.get_close_matches(name, points, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(points) or 'none'}"
    raise InputError(f"unknown {what} {name!r}; {hint}")


def missing_extra(error: ModuleNotFoundError, point: EntryPoint) -> InputError | None:
    """The one line for a library that an extra brings; None when the missing module is one of ours."""
    missing = (error.name or "").partition(".")[0]
    if not missing or missing in _OWN_PACKAGES:
        return None
    side = "engine" if point.module.startswith("rooftune.engine.") else "tuner"
    extra = "dev" if missing in _DEV_ONLY else "serve" if side == "engine" and missing in _SERVER_ONLY else side
    return InputError(f"{point.name!r} needs the module {missing!r}; in the checkout, run: pip install -e '.[{extra}]'")


def help_of(point: EntryPoint) -> str:
    """The command's one-line help, read from its source: the overview must not import numba, optuna or torch."""
    try:
        spec = importlib.util.find_spec(point.module)
    except ModuleNotFoundError:
        return ""
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return ""
    for node in ast.parse(Path(spec.origin).read_bytes()).body:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=point.attr)], value=ast.Call() as call)
                | ast.AnnAssign(target=ast.Name(id=point.attr), value=ast.Call() as call)
            ):
                # ``help`` is the second argument of ``Command``, or its keyword.
                values = [keyword.value for keyword in call.keywords if keyword.arg == "help"] + call.args[1:2]
                constants = [value.value for value in values if isinstance(value, ast.Constant)]
                return next((text for text in constants if isinstance(text, str)), "")
    return ""


EXIT_DEFECT = 70
EXIT_BROKEN_PIPE = 141
_TRACE = "ROOFTUNE_TRACE"
_Handler = Callable[[int, FrameType | None], object] | signal.Handlers


def main(argv: Sequence[str] | None = None, points: dict[str, EntryPoint] | None = None) -> int:
    """Run one command and return its exit code. The one wide border: nothing above it catches anything.

    argv: the words after ``rooftune`` (default: those of the process); points: the subcommands by
    name (default: every installed entry point of ``rooftune.commands``).
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if argv is None:
            _own_process()
        code = _dispatch(words, registered(COMMAND_GROUP) if points is None else points)
        sys.stdout.flush()  # now, so that a full disk is an answer and not a line from the interpreter's end
    except BrokenPipeError:
        _drop_output()
        return EXIT_BROKEN_PIPE
    except KeyboardInterrupt as stop:
        return _fail("terminated" if isinstance(stop, Terminated) else "interrupted", exit_code_of(stop))
    except RooftuneError as error:
        return _fail(str(error), error.exit_code)
    except Exception as error:  # noqa: BLE001 - the wide border: what arrives here is a defect of ours
        return _fail_unexpected(error)
    finally:
        if argv is None:
            _hear_signals(signal.SIG_DFL, signal.SIG_DFL)  # all is done: one more signal just ends it
    return code


def _own_process() -> None:
    """The process is ours: a polite end leaves as little behind as Ctrl-C does."""
    _hear_signals(signal.default_int_handler, _terminate)
    sys.unraisablehook = _end_again
    _mend_streams()


def _hear_signals(interrupt: _Handler, terminate: _Handler) -> None:
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as a shell has it for a job in the background
        signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, terminate)


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise Terminated


def _end_again(lost: "sys.UnraisableHookArgs") -> None:
    """A signal that came inside a finalizer or a callback ends nothing there: Python drops what is raised, so send it
    once more, a moment later."""
    if not isinstance(lost.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(lost)
        return
    number = signal.SIGTERM if isinstance(lost.exc_value, Terminated) else signal.SIGINT
    again = Timer(0.05, os.kill, (os.getpid(), number))
    again.daemon = True
    again.start()


def _dispatch(words: list[str], points: dict[str, EntryPoint]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview(points))
        return 0
    if words[0] in ("-V", "--version"):
        print(f"rooftune {version('rooftune')}")
        return 0
    if words[0].startswith("-"):
        raise InputError(f"unknown option {words[0]!r} before a command; rooftune --help lists the commands")
    point = find(words[0], points, "command")
    try:
        command: Command = point.load()
        parser = _Parser(prog=f"rooftune {command.name}", description=command.help)
        command.add_arguments(parser)
        arguments = _parse(parser, words[1:])
        return arguments if isinstance(arguments, int) else command.run(arguments)
    except ModuleNotFoundError as error:
        explained = missing_extra(error, point)
        if explained is None:
            raise
        raise explained from error


class _Parser(argparse.ArgumentParser):
    """argparse whose complaint is one line as well, without the usage text before it."""

    def __init__(self, *, prog: str, description: str) -> None:
        # An epilog holds examples, a line each.
        super().__init__(prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        # "-1s" is a value that its reader refuses with its bound; argparse would take it for an unknown flag.
        self._negative_number_matcher = re.compile(r"-\.?[0-9]")

    def error(self, message: str) -> NoReturn:
        # Targets are a closed list of flags, so that argparse can only say "unrecognized".
        target = re.search(r"unrecognized arguments:.*--(?:[a-z0-9]+-)*?p(\d[\d.]*)", message)
        if target:
            message += f" (a quantile pNN is any of p1 to p99, p99.5, p99.9, ... p100, not p{target[1]})"
        raise InputError(f"{message}; {self.prog} --help shows what it takes")


def _parse(parser: argparse.ArgumentParser, words: list[str]) -> argparse.Namespace | int:
    """The arguments, or the exit code when argparse has already answered (help: 0)."""
    try:
        return parser.parse_args(words)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 2


def _overview(points: dict[str, EntryPoint]) -> str:
    width = max((len(name) for name in points), default=0)
    lines = [f"  {name:<{width}}  {help_of(point)}".rstrip() for name, point in points.items()]
    return "\n".join(
        [
            "usage: rooftune [--version] COMMAND ...",
            "",
            "Tunes the token budget of a running LLM inference engine.",
            "",
            "commands (rooftune COMMAND --help shows its flags):",
            *lines,
            "",
            "exit codes: 0 done, 1 refused or infeasible, 2 usage or input, 3 unreachable, 70 a defect",
        ]
    )


def _fail(message: str, code: int) -> int:
    """One line on standard error, after the trace if ROOFTUNE_TRACE asks for it."""
    if os.environ.get(_TRACE, "") not in ("", "0"):
        traceback.print_exc()
    with suppress(OSError):  # its reader is gone or its disk is full: the exit code still says it
        print(f"rooftune: {' '.join(message.split())}", file=sys.stderr, flush=True)
    return code


def _fail_unexpected(error: Exception) -> int:
    """A full disk may meet any write and is no defect; everything else is."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        _drop_output()
        return _fail(f"{error.filename or 'output'}: {error.strerror}; free some space", UnreachableError.exit_code)
    where = f"set {_TRACE}=1 to see where, and please report it"
    return _fail(f"defect: {type(error).__name__}: {error}; {where}", EXIT_DEFECT)


def _mend_streams() -> None:
    """Closed streams lead nowhere, and what an encoding lacks is written as an escape that JSON reads as well."""
    spare = os.open(os.devnull, os.O_RDWR)
    while spare <= 2:  # a file of ours must not get the number of a closed stream, and its output with it
        spare = os.open(os.devnull, os.O_RDWR)
    os.close(spare)
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)
    codecs.register_error("rooftune", _escaped)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="rooftune")


def _escaped(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    units = error.object[error.start : error.end].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{a:02x}{b:02x}" for a, b in zip(units[::2], units[1::2], strict=True)), error.end


def _drop_output() -> None:
    """The interpreter flushes once more at its end; let that go nowhere."""
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, sys.stdout.fileno())
    os.close(sink)


if __name__ == "__main__":
    sys.exit(main())

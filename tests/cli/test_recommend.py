"""The main job through the real command: what it prints, writes and refuses."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from rooftune.policies.errors import InputError, UnreachableError
from rooftune.tuner.cli.flags.search import check_storage
from rooftune.tuner.report.folder import report_files
from tests.cli.commands import HEAD, rooftune, write_mix
from tests.report.records import record_from_json

NAMES = {"index.html", "report.md", "report.json"}
TARGETS = ("--ttft-p99", "4s", "--gap-p99", "50ms")


@pytest.fixture(scope="module")
def mix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mix(tmp_path_factory.mktemp("traffic") / "mix.csv")


def _words(traffic: Path, *more: object) -> tuple[object, ...]:
    return ("recommend", "--traffic", traffic, "--step-model", "8b-2tbs", "--trials", "6", *more)


def test_recommends_prints_and_writes(mix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rooftune(*_words(mix, *TARGETS, "--out", tmp_path / "report")) == 0
    output = capsys.readouterr()
    assert {path.name for path in (tmp_path / "report").iterdir()} == NAMES
    record = record_from_json((tmp_path / "report" / "report.json").read_text(), "report.json")
    assert record.verdict == "change"
    assert record.best.attainment is not None and record.current.attainment is not None
    assert record.best.attainment > record.current.attainment
    assert f"--max-num-scheduled-tokens {record.best.setting['step_tokens']}" in output.out
    assert "assumed, not measured" in output.out
    assert f"{record.best.attainment * 100:.1f} %" in output.out
    assert {"tenant", "prompt length"} <= {group.dimension for group in record.groups}
    assert sum(g.requests for g in record.groups if g.dimension == "tenant") == record.traffic.requests == 400
    assert record.engine.sources["kv_tokens"] == record.current_source == "assumed"
    # Progress goes to standard error only, never to standard output.
    assert "search" in output.err and "search 6/6" not in output.out
    # The files come from the record alone.
    for name, text in report_files(record).items():
        assert (tmp_path / "report" / name).read_text() == text


def test_json_is_the_record_and_nothing_else(mix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--current-budget", "1024", "--current-cap", "128", "--kv-tokens", "300000", "--seed", "3")
    code = rooftune(*_words(mix, *TARGETS, *given, "--rate-scale", "1.5x", "--json", "--quiet"))
    output = capsys.readouterr()
    record = record_from_json(output.out, "stdout")
    assert code == (1 if record.verdict == "infeasible" else 0)
    assert output.err == ""
    assert record.current.setting["step_tokens"] == 1024
    assert record.current.setting["chunk_cap_tokens"] == 128
    assert record.current_source == record.engine.sources["kv_tokens"] == "given"
    assert record.engine.kv_tokens == 300_000
    assert record.traffic.changes == ("arrivals 1.5 times as fast",)
    assert record.search.seed == 3


def test_infeasible_is_1_and_the_report_is_written(
    mix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rooftune(*_words(mix, "--ttft-p99", "1ms", "--gap-p50", "1ms", "--out", tmp_path, "--quiet")) == 1
    assert capsys.readouterr().out.startswith("No setting meets every target")
    assert {path.name for path in tmp_path.iterdir()} == NAMES
    record = record_from_json((tmp_path / "report.json").read_text(), "report.json")
    assert record.verdict == "infeasible"
    # 1 ms is below the floor of a step, so no rate would do, and the report says so.
    assert record.feasible is not None and record.feasible.scale is None
    assert "too tight" in (tmp_path / "report.md").read_text()


def test_infeasible_at_this_rate_names_a_feasible_one(mix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = (*TARGETS, "--rate-scale", "8x", "--json", "--quiet")
    assert rooftune(*_words(mix, *given)) == 1
    record = record_from_json(capsys.readouterr().out, "stdout")
    assert record.feasible is not None and record.feasible.scale is not None and record.feasible.width is not None
    assert 0.2 < record.feasible.scale < 1.0
    assert record.feasible.width <= 0.02
    assert record.timeline is not None and record.timeline.bad_current > 0
    # It holds: at that rate the same setting meets every target.
    best = record.best.setting
    words = ("simulate", "--traffic", mix, "--step-model", "8b-2tbs", "--step-tokens", int(best["step_tokens"]))
    scale = record.feasible.scale * 8
    more = ("--chunk-cap", int(best["chunk_cap_tokens"]), "--rate-scale", f"{scale:.9f}", "--json", "--quiet")
    assert rooftune(*words, *TARGETS, *more) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["feasible"] is True


def test_batch_profile_has_no_targets(mix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rooftune(*_words(mix, "--profile", "batch", "--quiet")) == 0
    assert "tokens/s" in capsys.readouterr().out


BAD_FILES = {
    "missing column": "arrival_s,prompt_tokens\n0,1\n",
    "negative": HEAD + "0,-5,1,a\n",
    "NaN": HEAD + "nan,5,1,a\n",
    "overflow": HEAD + f"0,{10**30},1,a\n",
    "empty": "",
    "unsorted": HEAD + "2,5,1,a\n1,5,1,a\n",
    "random bytes": bytes(range(256)).decode("latin-1"),
}


def _refused(words: tuple[object, ...], out: Path, capsys: pytest.CaptureFixture[str], *needed: str) -> None:
    before = sorted(out.parent.rglob("*"))
    assert rooftune(*words, "--out", out, "--quiet") == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1, output.err
    for word in needed:
        assert word in output.err
    assert sorted(out.parent.rglob("*")) == before


@pytest.mark.parametrize("kind", BAD_FILES)
def test_bad_traffic_is_one_line(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.csv"
    bad.write_bytes(BAD_FILES[kind].encode("latin-1"))
    _refused(_words(bad, *TARGETS), tmp_path / "out", capsys, "bad.csv")


@pytest.mark.parametrize(
    ("more", "needed"),
    [
        (("--ttft-p99", "0s"), "--ttft-p99"),
        (("--gap-p99", "30"), "write 30s or 30ms"),
        (("--gap-p99=-5ms",), "--gap-p99"),
        (("--gap-p99", "nanms"), "--gap-p99"),
        ((), "no target given"),
        (("--gap-p99", "30ms", "--gap-p99", "40ms"), "two bounds"),
        (("--gap-p99", "30ms", "--profile", "chat"), "exclude each other"),
        (("--profile", "chatter"), "documents-with-chat"),
        ((*TARGETS, "--current-budget", "128"), "sequence cap (256)"),
        ((*TARGETS, "--current-budget", "9000"), "ceiling (8192)"),
        ((*TARGETS, "--ceiling", "100"), "sequence cap (256)"),
        ((*TARGETS, "--step-model", "9b"), "8b-2tbs"),
        ((*TARGETS, "--rate-scale", "nan"), "--rate-scale"),
        ((*TARGETS, "--rate-scale", "0"), "--rate-scale"),
        ((*TARGETS, "--burst", "2x"), "--burst"),
        ((*TARGETS, "--window", "5s"), "--window"),
        ((*TARGETS, "--window", "9000s:5s"), "choose another window"),
        ((*TARGETS, "--trials", "0"), "--trials"),
        ((*TARGETS, "--kv-tokens", "1e6"), "--kv-tokens"),
        ((*TARGETS, "--prefix-caching", "yes"), "on or off"),
        ((*TARGETS, "--format", "xml"), "azure"),
        ((*TARGETS, "--engine", "tgi"), "vllm, rooftune"),
        ((*TARGETS, "--storage", "trials.db"), "sqlite:///trials.db"),
        ((*TARGETS, "--storage", "nosuchdb://here/x"), "no kind that is known"),
        ((*TARGETS, "--storage", "postgresql://me@[::1/x"), "not a database URL"),
        ((*TARGETS, "--storage", "sqlite:///trials.db?timeout=x"), "driver does not take"),
    ],
)
def test_bad_flag_is_one_line(
    mix: Path, more: tuple[str, ...], needed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _refused(_words(mix, *more), tmp_path / "out", capsys, needed)


def test_missing_traffic_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _refused(_words(tmp_path / "none.csv", *TARGETS), tmp_path / "out", capsys, "does not exist")


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_unwritable_folder_is_refused_before_the_search(
    mix: Path, place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("mine")
    monkeypatch.setattr("rooftune.tuner.cli.recommend.recommend", lambda *args, **named: pytest.fail("the search ran"))
    _refused(_words(mix, *TARGETS), tmp_path / place, capsys, "--out")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_failure_in_the_search_leaves_no_folder(
    mix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*args: object, **named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rooftune.tuner.cli.recommend.recommend", stopped)
    assert rooftune(*_words(mix, *TARGETS, "--out", tmp_path / "out")) == 130
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "flag", ["--ttft-p50", "--gap-p99.9", "--tpot-p95", "--longest-gap-p90", "--e2e-p100", "--queue-p1"]
)
def test_any_metric_at_any_quantile(mix: Path, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = rooftune(*_words(mix, flag, "20s", "--trials", "2", "--window", "0s:20s", "--json", "--quiet"))
    assert code == 0
    target = json.loads(capsys.readouterr().out)["targets"][0]
    metric, _, quantile = flag.removeprefix("--").rpartition("-p")
    assert target["metric"] == metric.replace("-", "_")
    assert target["quantile"] * 100 == pytest.approx(float(quantile))


@pytest.mark.slow
def test_an_engine_with_our_hook_has_more_knobs(mix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tried = {}
    for engine in ("vllm", "rooftune"):
        assert rooftune(*_words(mix, *TARGETS, "--engine", engine, "--trials", "12", "--json", "--quiet")) == 0
        trials = json.loads(capsys.readouterr().out)["trials"]
        tried[engine] = {name for trial in trials if trial["role"] == "search" for name in trial["setting"]}
    assert tried["vllm"] == {"step_tokens", "chunk_cap_tokens", "max_running"}
    assert tried["rooftune"] > tried["vllm"] and "order_policy" in tried["rooftune"]


@pytest.mark.slow
def test_trials_are_kept_in_the_storage(mix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rooftune(*_words(mix, *TARGETS, "--storage", f"sqlite:///{tmp_path}/trials.db", "--quiet")) == 0
    with sqlite3.connect(tmp_path / "trials.db") as kept:
        assert kept.execute("select count(*) from trials where state = 'COMPLETE'").fetchone() == (6,)


def test_unreachable_storage_is_exit_3(mix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rooftune(*_words(mix, *TARGETS, "--storage", f"sqlite:///{tmp_path}/no/trials.db", "--quiet")) == 3
    output = capsys.readouterr()
    assert output.out == "" and "does not answer" in output.err and output.err.count("\n") == 1


def test_a_file_that_is_not_a_database_is_refused_and_left_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a database, and longer than the header of one would be" * 3)
    before = path.read_bytes()
    with pytest.raises(UnreachableError, match="not a database"):
        check_storage(f"sqlite:///{path}")
    assert path.read_bytes() == before


def test_a_locked_database_is_waited_for(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "trials.db", isolation_level=None)) as other:
        other.execute("create table one (a)")
        other.execute("begin exclusive")
        with pytest.raises(UnreachableError, match="database is locked; wait until"):
            check_storage(f"sqlite:///{tmp_path}/trials.db?timeout=0")


def test_a_password_is_never_shown() -> None:
    with pytest.raises((InputError, UnreachableError)) as error:
        check_storage("postgresql://me:secret@127.0.0.1:1/x")
    assert "secret" not in str(error.value) and "me:***@" in str(error.value)


def test_an_empty_out_is_refused_and_writes_nowhere(
    mix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rooftune.tuner.cli.recommend.recommend", lambda *args, **named: pytest.fail("the search ran"))
    before = sorted(tmp_path.rglob("*"))
    assert rooftune(*_words(mix, *TARGETS), "--out", "", "--quiet") == 2
    assert "--out is empty" in capsys.readouterr().err and sorted(tmp_path.rglob("*")) == before


def test_traffic_that_arrives_at_once_has_no_rate_and_no_burst(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rush = tmp_path / "rush.csv"
    rush.write_text(HEAD + "0,400,20,gold\n" * 40)
    assert rooftune(*_words(rush, *TARGETS, "--quiet", "--out", tmp_path / "report")) in (0, 1)
    page = (tmp_path / "report" / "report.md").read_text()
    assert "40 requests at once" in page and "With a burst" not in page and "requests in 0" not in page
    record = record_from_json((tmp_path / "report" / "report.json").read_text(), "report.json")
    assert record.burst_attainment is None and record.traffic.span_s == 0.0

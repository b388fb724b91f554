"""A configuration that cannot be used: one line with file, line, key, value, bound and remedy, and no side effect."""

import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rooftune.policies.errors import InputError
from rooftune.tuner.config import Config, Override, load_config
from rooftune.tuner.config.tree import parse_tree

ENGINE = "engine: {url: 'http://127.0.0.1:8000'}\n"
TARGETS = "targets: [{metric: ttft, bound: 2s}]\n"


def load(tmp_path: Path, text: str, *overrides: Override, **environ: str) -> Config:
    path = tmp_path / "rooftune.yaml"
    path.write_text(text)
    return load_config(path, overrides, environ)


def complaint(tmp_path: Path, text: str, *overrides: Override, **environ: str) -> str:
    with pytest.raises(InputError) as caught:
        load(tmp_path, text, *overrides, **environ)
    assert caught.value.exit_code == 2
    line = str(caught.value)
    assert "\n" not in line
    return line.removeprefix(f"{tmp_path}/")


# the file's text after the engine, and what the error must name: line, key, value, bound
BAD = [
    ("mode: fast", "2: mode is 'fast'", "'shadow' or 'live'"),
    ("cadence: {cycle_s: 0}", "2: cadence.cycle_s is 0", "above 0"),
    ("cadence: {cycle_s: 60, lease_s: 2m}", "2: cadence.lease_s is 120.0", "at least 180 (3 x cadence.cycle_s"),
    ("cadence: {lease_s: 2d}", "2: cadence.lease_s is '2d'", "at most 86400"),
    ("cadence: {lease_s: 90 parsecs}", "cadence.lease_s is '90 parsecs'", "a time with a unit"),
    ("cadence: {window_s: 1s}", "cadence.window_s is 1.0", "at least 1 x cadence.cycle_s, which is 15"),
    ("cadence: {settle_s: 5m}", "cadence.settle_s is 300.0", "below half of cadence.verify_s"),
    ("guard: {max_inconclusive_s: 1m}", "guard.max_inconclusive_s is 60.0", "at least 1800"),
    ("guard: {largest_ratio: 1}", "guard.largest_ratio is 1", "above 1"),
    ("guard: {kv_full: .nan}", "guard.kv_full is nan", "finite"),
    ("guard:\n  kv_full: 98", "3: guard.kv_full is 98", "at most 1"),
    ("rollback: {failed_share: 2}", "rollback.failed_share is 2", "at most 1"),
    ("targets: [{metric: ttft, bound: 30}]", "targets.0.bound is 30", "string"),
    ("targets: [{metric: ttft, bound: 0s}]", "targets.0.bound is '0s'", "above 0"),
    ("targets: [{metric: speed, bound: 2s}]", "targets.0.metric is 'speed'", "'ttft'"),
    ("targets: [{metric: gap, bound: 2s, quantile: 99}]", "targets.0.quantile is 99", "at most 1"),
    ("targets: [{bound: 2s}]", "targets.0.metric is missing", "add it"),
    ("profile: chatty", "2: profile is 'chatty'", "documents-with-chat"),
    ("profile: chat\n" + TARGETS, "2: profile is 'chat'", "left out while targets are given"),
    ("targets: [{metric: gap, bound: 1s}, {metric: gap, bound: 2s}]", "targets is", "one bound for each metric"),
    ("mode: live", "2: mode is 'live'", "shadow while there are no targets"),
    ("mode: live\nprofile: batch", "3: profile is 'batch'", "with latency targets"),
    ("bounds: {step_tokens: [64, 32]}", "bounds.step_tokens is [64, 32]", "1 <= least <= most"),
    ("bounds: {step_tokens: [0, 32]}", "bounds.step_tokens is [0, 32]", "1 <= least"),
    ("bounds: {step_tokens: [64, 128.5]}", "bounds.step_tokens is [64, 128.5]", "two whole numbers"),
    ("bounds: {step_tokens: [64, yes]}", "bounds.step_tokens.1 is True", "must be"),
    ("bounds: {step_tokenz: [64, 128]}", "bounds is 'step_tokenz'", "step_tokens, chunk_cap_tokens"),
    ("bounds: {max_running: [1, 8]}", "bounds.max_running is [1, 8]", "a knob that is searched"),
    ("knobs: []", "2: knobs is []", "at least 1"),
    ("knobs: [step_tokens, step_tokens]", "knobs is ['step_tokens', 'step_tokens']", "each knob once"),
    ("listen: 0.0.0.0:9109", "2: listen is '0.0.0.0:9109'", "loopback address while there is no token_file"),
    ("listen: 9109", "2: listen is 9109", "string"),
    ("maintenance: {timezone: Mars/Olympus}", "maintenance.timezone is 'Mars/Olympus'", "a time zone"),
    ("maintenance: {timezone: ../../etc/passwd}", "maintenance.timezone is", "a time zone"),
    ("maintenance: {no_push: [Mon 2-4]}", "maintenance.no_push.0 is 'Mon 2-4'", "HH:MM"),
    ("search: {memory_bytes: 5}", "search.memory_bytes is 5", "at least 3e+08"),
    ("search: {trials: true}", "search.trials is True", "integer"),
    ("targets: [{metric: ttft, bound: -20ms}]", "targets.0.bound is '-20ms'", "at least 0"),
    ("retention: {days: 0}", "retention.days is 0", "above 0"),
    ("log: {level: loud}", "log.level is 'loud'", "'debug'"),
    ("storage: 7", "storage is not shown", "string"),
    ("cadense: {}", "2: unknown key cadense", "did you mean cadence?"),
    ("cadence:\n  cycle: 3", "3: unknown key cadence.cycle", "did you mean cycle_s?"),
    ("targets: [{metrik: ttft, bound: 2s}]", "unknown key targets.0.metrik", "did you mean metric?"),
    ("engine: {url: x}", "2: engine is given twice", "first in line 1"),
    ("a: &x 1\nb: *x", "3: aliases are not allowed", "correct the YAML"),
    ("a: " + "[" * 40 + "]" * 40, "2: nested deeper than 12", "flatten"),
    ("a: !!python/object:os.system x", "2: a is 'x'", "must be plain"),
    ("state: 2020-01-01", "2: state is '2020-01-01'", "quotes"),
    ("1: 2", "2: key '1' is not a plain word", "quotes"),
    ("a: 'x", "unexpected end", "correct the YAML"),
    ("a: {", "expected", "correct the YAML"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "named", "bound"), BAD, ids=[text.replace("\n", " ")[:50] for text, _, _ in BAD])
def test_a_bad_value_is_one_line_with_place_value_and_bound(tmp_path: Path, text: str, named: str, bound: str) -> None:
    line = complaint(tmp_path, ENGINE + text + "\n")
    assert line.startswith("rooftune.yaml")
    assert named in line and bound in line
    assert ";" in line


@pytest.mark.parametrize(
    ("url", "bound"),
    [
        ("ftp://h", "http://HOST:PORT"), ("h:8000", "http://HOST:PORT"), ("http://", "http://HOST:PORT"),
        ("http://h:99999", "http://HOST:PORT"), ("http://u:secret@h:80", "without user and password"),
        ("http://h:80/?a=1", "without a query"), ("unix:", "http://HOST:PORT"), ("", "http://HOST:PORT"),
    ],
)  # fmt: skip
def test_an_invalid_engine_address_is_one_line(tmp_path: Path, url: str, bound: str) -> None:
    line = complaint(tmp_path, json.dumps({"engine": {"url": url}}))
    assert line.startswith("rooftune.yaml:1: engine.url is ") and bound in line
    assert "secret" not in line


def test_without_an_engine_the_remedy_is_the_flag(tmp_path: Path) -> None:
    assert "give --engine URL" in complaint(tmp_path, "mode: shadow\n")
    with pytest.raises(InputError, match=r"the configuration: engine is missing; give --engine URL"):
        load_config(None, environ={})


def test_files_that_cannot_be_read_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere\.yaml cannot be read: No such file"):
        load_config(tmp_path / "nowhere.yaml", environ={})
    with pytest.raises(InputError, match="cannot be read: Is a directory"):
        load_config(tmp_path, environ={})
    path = tmp_path / "x.yaml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="is not UTF-8 text"):
        load_config(path, environ={})
    path.write_text("a: " + "x" * 300_000)
    with pytest.raises(InputError, match="is larger than 262144 bytes"):
        load_config(path, environ={})
    path.write_text("- a\n")
    with pytest.raises(InputError, match="must be a mapping"):
        load_config(path, environ={})


def test_flags_override_the_environment_which_overrides_the_file(tmp_path: Path) -> None:
    text = ENGINE + "state: here\nmode: shadow\n" + TARGETS
    assert load(tmp_path, text).state == tmp_path / "here"
    assert load(tmp_path, text, ROOFTUNE_STATE="/there").state == Path("/there")
    for broken in ({"ROOFTUNE_STATE": "~surely-nobody/x"}, {}):
        with pytest.raises(InputError, match="write the whole path"):
            load(tmp_path, text if broken else text.replace("here", "~surely-nobody/x"), **broken)
    flags = [Override("state", "/flag", "--state"), Override("mode", "live", "--mode")]
    config = load(tmp_path, text, *flags, ROOFTUNE_STATE="/there")
    assert (config.state, config.mode) == (Path("/flag"), "live")
    assert load(tmp_path, text, ROOFTUNE_STORAGE="sqlite:///x.db").storage_url == "sqlite:///x.db"


def test_an_error_names_the_flag_or_variable(tmp_path: Path) -> None:
    line = complaint(tmp_path, ENGINE, Override("engine.url", "nothing", "--engine"))
    assert line.startswith("--engine: engine.url is 'nothing'")
    line = complaint(tmp_path, ENGINE, ROOFTUNE_STORAGE="postgresql://u:secret@h/x\ny")
    assert line.startswith("ROOFTUNE_STORAGE: storage is ")


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    text = "engine: {url: 'http://h:1', token_file: t/e}\ntoken_file: t/c\nfreeze_file: /abs\nlisten: 0.0.0.0:1\n"
    config = load(tmp_path, text)
    assert config.engine.token_file == tmp_path / "t/e"
    assert config.token_file == tmp_path / "t/c"
    assert config.freeze_file == Path("/abs")
    assert config.storage_url == f"sqlite:///{tmp_path}/rooftune-state/studies.db"


WORDS = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), max_size=10)
NUMBERS = st.integers(-(10**6), 10**6) | st.floats(allow_nan=False, allow_infinity=False)
PLAIN = st.recursive(
    st.none() | st.booleans() | NUMBERS | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc_", min_size=1), inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=25)
@given(st.dictionaries(st.text("abcde_", min_size=1, max_size=6), PLAIN, max_size=4))
@example({"_": 1e-13, "a": [-2e5, 1e300]})
def test_json_is_read_as_typed_values(values: dict[str, object]) -> None:
    assert parse_tree(json.dumps(values, ensure_ascii=False), "f").values == values


@settings(max_examples=80)
@given(st.text("{}[]:-,'\"&*!|>#%@ \n\tab1.~<?", max_size=40))
def test_any_text_is_a_mapping_or_one_line(text: str) -> None:
    message = "f: a mapping"
    try:
        values: object = parse_tree(text, "f").values
    except InputError as error:
        message, values = str(error), {}
    assert isinstance(values, dict)
    assert message.startswith("f") and "\n" not in message

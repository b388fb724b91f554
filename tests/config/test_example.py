"""The complete example, the exported schema, and the values that guard and verdict are made of."""

import dataclasses
import json
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel

from rooftune.policies.guard import GuardLimits
from rooftune.policies.slo import PROFILES
from rooftune.policies.verify import RollbackThresholds
from rooftune.tuner.config import Config, EngineSection, json_schema, load_config
from rooftune.tuner.config.sections import GuardSection, RollbackSection, SearchKnob
from rooftune.tuner.config.tokens import holds_token
from rooftune.tuner.search.space import EVERYTHING

DEPLOY = Path(__file__).parents[2] / "deploy"


def _keys(section: type[BaseModel]) -> set[str]:
    """Dotted names of every key that a section takes."""
    found: set[str] = set()
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found |= {f"{name}.{inner}" for inner in _keys(kind)}
        else:
            found.add(name)
    return found


def _given(values: dict[str, Any]) -> set[str]:
    found: set[str] = set()
    for name, value in values.items():
        inner = _given(value) if isinstance(value, dict) and name != "bounds" else set()
        found |= {f"{name}.{key}" for key in inner} or {name}
    return found


def test_the_example_loads_and_names_every_key() -> None:
    config = load_config(DEPLOY / "rooftune.yaml", environ={})
    assert config.mode == "shadow" and len(config.targets) == 2
    assert _given(yaml.safe_load((DEPLOY / "rooftune.yaml").read_text())) == _keys(Config)


def test_the_examples_defaults_are_the_defaults() -> None:
    given = load_config(DEPLOY / "rooftune.yaml", environ={})
    plain = Config(engine=EngineSection(url="http://h:1"))
    for name in ("cadence", "search", "guard", "retention", "log", "knobs", "listen", "mode"):
        assert getattr(given, name) == getattr(plain, name), name


def test_the_exported_schema_is_the_code() -> None:
    shown = (DEPLOY / "rooftune.schema.json").read_text()
    assert shown == json_schema(), "run: rooftune run --print-schema > deploy/rooftune.schema.json"
    assert json.loads(shown)["additionalProperties"] is False


def test_guard_and_rollback_are_the_policies_own_fields_and_defaults() -> None:
    windows = {"no_push", "push_only"}
    assert set(GuardSection.model_fields) == {field.name for field in dataclasses.fields(GuardLimits)} - windows
    assert set(RollbackSection.model_fields) == {field.name for field in dataclasses.fields(RollbackThresholds)}
    plain = Config(engine=EngineSection(url="http://h:1"))
    assert plain.limits() == GuardLimits()
    assert plain.thresholds() == RollbackThresholds()


def test_searchable_knobs_are_those_the_search_knows() -> None:
    assert set(get_args(SearchKnob)) == set(EVERYTHING)


def test_thresholds_and_windows_are_loaded() -> None:
    config = load_config(DEPLOY / "rooftune.yaml", environ={})
    assert config.thresholds() == RollbackThresholds(0.5, 10.0, 5.0, 0.02)
    assert len(config.limits().no_push) == 6 and config.limits().push_only == ()
    assert config.knob_bounds() == {"step_tokens": (64.0, 2048.0), "chunk_cap_tokens": (0.0, 2048.0)}


@pytest.mark.parametrize("name", sorted(set(PROFILES) - {"batch"}))
def test_a_profile_expands_to_its_targets(name: str) -> None:
    config = Config(engine=EngineSection(url="http://h:1"), profile=name, mode="live")
    assert config.slo() == PROFILES[name]


def test_knobs_without_bounds_are_unbounded() -> None:
    plain = Config(engine=EngineSection(url="http://h:1"), knobs=("step_tokens", "order_policy"))
    assert plain.knob_bounds() == {"step_tokens": (1.0, float("inf")), "order_policy": (0.0, float("inf"))}


def test_the_summary_shows_no_secret(tmp_path: Path) -> None:
    config = Config(engine=EngineSection(url="http://h:1"), storage="postgresql://u:secret@h/x")
    assert "secret" not in "\n".join(config.summary()) + repr(config)


def test_tokens_are_read_at_every_use(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("a" * 16 + "\n" + "b" * 20 + "\n")
    assert holds_token(path, "a" * 16) and holds_token(path, "b" * 20) and not holds_token(path, "a" * 15)
    path.write_text("c" * 16)
    assert holds_token(path, "c" * 16) and not holds_token(path, "a" * 16)
    for content in ("", "short", "\n\n", "x" * 70_000):
        path.write_text(content)
        assert not holds_token(path, content) and not holds_token(path, "")
    path.unlink()
    assert not holds_token(path, "c" * 16)

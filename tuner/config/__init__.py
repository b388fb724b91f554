"""The configuration: ``Config`` is the value, ``load_config`` makes it from YAML, environment and flags."""

from rooftune.tuner.config.load import Override, json_schema, load_config
from rooftune.tuner.config.model import Config
from rooftune.tuner.config.sections import CadenceSection, EngineSection, RetentionSection

__all__ = [
    "CadenceSection", "Config", "EngineSection", "Override", "RetentionSection", "json_schema",
    "load_config",
]  # fmt: skip

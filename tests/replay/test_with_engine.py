"""``rooftune replay`` against ``rooftune serve`` with the fake engine: both sides report the same requests."""

from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest

from rooftune.policies.commands import COMMAND_GROUP
from rooftune.tuner.cli.main import main
from tests.replay.rows import read_result
from tests.system.test_serve_fake import TOKEN, serving, url

POINTS = {"replay": EntryPoint("replay", "rooftune.tuner.cli.replay:COMMAND", COMMAND_GROUP)}


@pytest.mark.engine
def test_the_engines_times_are_found_and_lie_within_the_clients(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    rows = "".join(f"{0.05 * at},{64 + at % 3},{5 + at % 4},{'1 2' if at % 2 else '1'}\n" for at in range(40))
    path.write_text(
        "# rooftune-traffic 1 prefix_span_tokens=32\narrival_s,prompt_tokens,output_tokens,prefix_keys\n" + rows
    )
    (tmp_path / "token").write_text(TOKEN)
    with serving("--tuning-token-file", str(tmp_path / "token")) as (_, lines):
        words = ["--url", url(lines), "--traffic", str(path), "--tuning-token-file", str(tmp_path / "token"), "--quiet"]
        code = main(["replay", *words, "--gap-p99", "50ms", "--out", str(tmp_path / "r.json")], POINTS)
    assert code == 0
    result = read_result(tmp_path / "r.json")
    assert result.failures == {} and result.engine is not None
    engine = result.engine
    assert (engine.missing, engine.others, engine.lost) == (0, 0, 0)
    assert [one.index for one in engine.requests] == list(range(40))
    for mine, theirs in zip(result.requests, engine.requests, strict=True):
        assert mine.output_tokens == theirs.output_tokens == mine.asked_tokens
        assert mine.cached_tokens == theirs.cached_tokens
        assert theirs.gap_count == mine.asked_tokens - 1
    # The shared prefix of the prompts hits the cache, so equal keys were equal tokens.
    assert np.mean([one.cached_tokens >= 32 for one in engine.requests]) > 0.8
    # A client cannot see a token before the engine made it (within a millisecond: two clocks are read).
    later_s = [
        mine.sent_s + (mine.ttft_s or 0.0) - (theirs.arrival_s - engine.clock_offset_s + theirs.ttft_s)
        for mine, theirs in zip(result.requests, engine.requests, strict=True)
    ]
    assert np.median(later_s) > -0.001
    assert [side.side for side in result.verdicts] == ["client", "engine"]
    assert all(side.judged == 40 and side.attainment is not None for side in result.verdicts)

"""What arrives and what is carried, from the engine's rows to metrics, signal and words."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rooftune.policies.request import Setting
from rooftune.tuner.clock import ManualClock
from rooftune.tuner.control.cycle.observe import Seen
from rooftune.tuner.control.cycle.propose import carried_by, load_part
from rooftune.tuner.control.explain.explain import explain, load
from rooftune.tuner.control.explain.report import report_of
from rooftune.tuner.control.job import Job, SearchAnswer
from rooftune.tuner.control.outcome import Carries, LoadPart
from rooftune.tuner.control.signals.codes import Signal
from rooftune.tuner.control.signals.pressure import overload
from rooftune.tuner.control.state.store import StateFile
from rooftune.tuner.control.status.series import Series
from rooftune.tuner.control.status.view import About, View
from tests.control.cycle_records import hold, proposal, twin
from tests.control.doubles import Rig, proposes, rig
from tests.control.live import Traffic

BOOT, SMALL = Setting(2048, max_running=32), Setting(512, max_running=32)


def part(offered: float | None = 1.9, here: float | None = 1.6, boot: float = 1.4, **changes: Any) -> LoadPart:
    plain: dict[str, Any] = {
        "offered_rps": offered, "in_force": Carries(sustainable_rps=here, busy_share=0.97),
        "boot": Carries(sustainable_rps=boot), "proposed": Carries(sustainable_rps=here),
    }  # fmt: skip
    return LoadPart(**(plain | changes))


def seen(arrived: float, span_s: float = 100.0, setting: Setting = SMALL) -> Seen:
    return cast(Seen, SimpleNamespace(arrived=(arrived, span_s), setting=setting, boot=BOOT))


@pytest.fixture(scope="module")
def busy() -> Rig:
    """A search that says what it found of the load, and a proposal that carries more."""

    def reply(job: Job) -> Any:
        answer = cast(SearchAnswer, proposes(step_tokens=512, gain=0.12)(job))
        assert job.headroom == 0.15 and job.horizon_s == 120.0 and job.largest_ratio == 64.0
        assert job.boot.step_tokens == 2048
        proposed = Carries(sustainable_rps=40.0)
        return answer.model_copy(update={"load": part(5.0, 0.5, boot=0.5, proposed=proposed)})

    run = rig(reply)
    run.run(10, until=lambda record: record.pushed is not None)
    run.run_trial()
    run.run(1)
    return run


def test_the_offered_rate_is_known_in_every_cycle_and_counts_what_has_not_ended(busy: Rig) -> None:
    rates = [r.load.offered_rps for r in busy.records if r.load is not None and r.load.offered_rps is not None]
    assert len(rates) >= len(busy.records) - 1
    assert rates[-1] == pytest.approx(Traffic().rate_rps, rel=0.25)


def test_an_overload_is_a_signal_until_a_setting_that_carries_it_is_in_force(busy: Rig) -> None:
    codes = [{signal.code for signal in record.signals} for record in busy.records]
    pushed = next(i for i, record in enumerate(busy.records) if record.pushed is not None)
    assert Signal.OVERLOAD.value in codes[pushed]
    signal = next(s for s in busy.records[pushed].signals if s.code == Signal.OVERLOAD.value)
    assert signal.evidence["in_force_rps"] == 0.5 < signal.evidence["offered_rps"] < signal.evidence["proposed_rps"]
    assert Signal.OVERLOAD.value not in codes[-1]
    last = busy.records[-1].load
    assert last is not None and last.in_force.sustainable_rps == 40.0 and not last.overload


def test_what_is_carried_follows_the_setting_in_force() -> None:
    answer = SearchAnswer(twin=twin(), proposal=proposal(setting=SMALL._asdict()), load=part(2.0, 1.5, boot=1.4))
    assert answer.load is not None
    latest = answer.load.model_copy(update={"proposed": Carries(sustainable_rps=2.5)})
    carried = carried_by(answer, latest, seen(200, setting=Setting(1024, max_running=32)))
    assert load_part(seen(200, setting=Setting(1024, max_running=32)), latest, carried).in_force.sustainable_rps == 1.5
    assert load_part(seen(200, setting=SMALL), latest, carried).in_force.sustainable_rps == 2.5
    assert load_part(seen(200, setting=BOOT), latest, carried).in_force.sustainable_rps == 1.4
    other = load_part(seen(200, setting=Setting(77, max_running=32)), latest, carried)
    assert other.in_force.sustainable_rps is None and not other.overload


def test_chance_in_the_arrivals_is_no_overload() -> None:
    latest = part(1.5, 1.6)
    carried = {SMALL: latest.in_force}
    assert not load_part(seen(165.0), latest, carried).overload  # 1.65 +- 0.13
    assert load_part(seen(200.0), latest, carried).overload
    # What nothing carries stays an overload while as much arrives, whatever is in force.
    nothing = part(1.9, 1.6, overload=True)
    assert load_part(seen(185.0), nothing, {}).overload and not load_part(seen(150.0), nothing, {}).overload


def test_without_steps_or_a_search_nothing_is_made_up() -> None:
    assert load_part(seen(0.0, 0.0), part(), {}) == LoadPart(offered_rps=None)
    assert load_part(seen(50.0), None, {}) == LoadPart(offered_rps=0.5)
    assert list(overload(LoadPart(offered_rps=None, overload=True))) == []


@pytest.mark.parametrize(
    ("known", "says"),
    [
        (part(overload=True), "offered 1.9 requests/s, this server carries 1.6; add a replica or move a target"),
        (part(1.2), "offered 1.2 requests/s, the setting in force carries 1.6"),
        (
            part(overload=True, proposed=Carries(sustainable_rps=2.5)),
            "offered 1.9 requests/s, the setting in force carries 1.6 and another one 2.5",
        ),
        (
            part(1.5, overload=True),
            "offered 1.5 requests/s, this server carries 1.6, which leaves too little headroom; add a replica",
        ),
        (LoadPart(offered_rps=1.0), ""),
        (part(None), ""),
    ],
)
def test_one_sentence_for_people(known: LoadPart, says: str) -> None:
    assert load(known) == says
    record = with_load(known)
    assert (says in explain(record)[0]) and (not says or f"- load: {says}" in report_of([record], "chat"))


def with_load(known: LoadPart) -> Any:
    return hold(1).model_copy(update={"load": known})


def test_metrics_for_an_autoscaler(tmp_path: Path) -> None:
    clock = ManualClock(wall_s=1_764_460_800.0)
    state = StateFile.own(tmp_path / "s", clock=clock)
    view = View(About("chat", "live", "abcd", 15.0), clock)
    series = Series(view, state)
    view.publish(with_load(part(here=None)))
    families = text_string_to_metric_families(series.page().decode())
    found = {(s.name, s.labels.get("setting", "")): s.value for f in families for s in f.samples}
    assert found["rooftune_offered_rps", ""] == 1.9
    assert found["rooftune_sustainable_rps", "boot"] == 1.4
    assert ("rooftune_sustainable_rps", "in_force") not in found  # not known is no sample
    assert found["rooftune_busy_share", "in_force"] == 0.97
    state.close()

"""A track of the twin whose evaluations carry what live trials taught."""

from collections.abc import Sequence
from dataclasses import replace

from rooftune.policies.request import Setting
from rooftune.policies.slo import Slo
from rooftune.tuner.search.arena import Track
from rooftune.tuner.search.evaluation import Evaluation, Role
from rooftune.tuner.search.lessons import Lesson, correction
from rooftune.tuner.search.objective import MARGIN_CAP
from rooftune.tuner.search.rank import rank


class Corrected:
    """A track whose evaluations carry the live corrections."""

    def __init__(self, track: Track, lessons: Sequence[Lesson], slo: Slo) -> None:
        self.track, self._lessons = track, lessons
        # Who misses more requests than all targets together allow to miss cannot meet them all.
        self._least = 1.0 - sum(1.0 - target.quantile for target, _ in slo.all_targets())

    def look(self, settings: Sequence[Setting], role: Role) -> list[Evaluation]:
        return [self.mended(e) for e in self.track.look(settings, role)]

    def lead(self, looks: Sequence[Evaluation], role: Role, most: int, slo: Slo) -> list[Evaluation]:
        """The best looks on all of the traffic, from the twin's own values again."""
        chosen = list(dict.fromkeys(e.setting for e in sorted(looks, key=lambda e: rank(e, slo))))[:most]
        return [self.mended(e) for e in self.track.whole.run([(setting, role) for setting in chosen])]

    def mended(self, raw: Evaluation) -> Evaluation:
        change = correction(raw.setting, self._lessons)
        if change == 0.0:
            return raw
        share = min(max(raw.attainment + change, 0.0), 1.0)
        return replace(raw, attainment=share, feasible=raw.feasible and (change > 0.0 or share >= self._least))

    def constraint(self, mended: Evaluation) -> dict[str, float]:
        """Beside the targets' own: what live results say of them all together."""
        if not self._lessons:
            return {}
        contradicted = not mended.feasible and all(row.margin <= 0.0 for row in mended.margins if row.samples > 0)
        return {"live": MARGIN_CAP * max(self._least - mended.attainment, 1e-3) if contradicted else -1.0}

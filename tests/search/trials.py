"""What a study holds, for tests."""

from collections import Counter

from rooftune.tuner.search.study import SettingStudy


def counts(study: SettingStudy) -> Counter[str]:
    """Trials by state: COMPLETE, FAIL, RUNNING, WAITING; those of other workers and of earlier runs included."""
    return Counter(trial.state.name for trial in study._study.get_trials())

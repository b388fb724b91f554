"""A window of live requests as traffic for the twin."""

import numpy as np
from rooftune.tuner.model.demand import DemandWindow, fill_lengths
from rooftune.tuner.sim.workload import Traffic


def window_traffic(window: DemandWindow, *, seed: int, tenant_names: tuple[str, ...] = ("default",)) -> Traffic:
    """The window's requests from its first arrival on (0 s); unknown output lengths are drawn, see ``demand``.

    Replay several seeds where the answer hangs on the unfinished ones. Raises InputError when too few finished.
    """
    nothing = np.zeros(len(window), dtype=np.int64)
    return Traffic(
        arrival_s=window.arrival_s - window.arrival_s[0],
        prompt_tokens=window.prompt_tokens,
        output_tokens=fill_lengths(window, seed),
        cached_tokens=window.cached_tokens if len(window.cached_tokens) else nothing,
        tenant=window.tenant if len(window.tenant) else nothing,
        tenant_names=tenant_names,
        name="live window",
    )

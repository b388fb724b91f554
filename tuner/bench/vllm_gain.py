"""Bench ``vllm-gain``: what the controller brings a running vLLM, against an honest sweep and against its default.

The rules and the judge of ``live-gain``, at a real vLLM server with our hook: a fixed list, every eighth prompt long,
at 60 to 85 % of the rate at which the default's queue grows; a request is good when its TTFT and its longest gap are
within the default's own p70. First every budget and cap in rounds of that list, interleaved; then a fresh server with
``rooftune run --mode live`` from cold, which may push ten times; the second half of its rounds counts. At the end the
controller is killed: the bench fails unless the server is at its boot setting when the lease has ended.
``short``: one server for all of it, two cells, a few rounds; it shows that the parts work together.
"""

import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from rooftune.policies.commands import Figure
from rooftune.policies.errors import RefusedError
from rooftune.policies.request import Setting
from rooftune.tuner.bench import live_gain
from rooftune.tuner.bench.children import Child
from rooftune.tuner.bench.live_gain import Size, Swept, Tuned, cells, figures_beside_default, second_half, sweep, tune
from rooftune.tuner.bench.live_gain_rounds import Bed, Sizes, share_of_best
from rooftune.tuner.bench.vllm_bed import BOOT_TOKENS, DEFAULT, FIRST_SPAN_S, open_ground
from rooftune.tuner.sim.twin import warm

MOST_PUSHES = 10
# Beyond the end of the lease: the read that sees it, and a step in flight.
RETURN_SLACK_S = 5.0
POLL_S = 0.25


def _size(size: Size) -> Size:
    """The same with the caps that bind alone, and with that much time between two pushes that there cannot be more of
    them than are allowed."""
    settings = tuple(one for one in size.settings if one.chunk_cap_tokens < one.step_tokens)
    return replace(size, settings=settings, dwell_s=size.tuned_rounds * size.span_s / MOST_PUSHES, timeout_s=20.0)


SHORT = _size(
    replace(
        live_gain.SHORT,
        sizes=Sizes((20, 120), (600, 1000), (8, 24)),
        span_s=1.5,
        settings=cells(DEFAULT, (128, 2048), (0,)),
        tuned_rounds=6,
        cadence={**live_gain.SHORT.cadence, "search_requests": 20, "verify_min_requests": 10, "lease_s": 4},
        trials=20,
    )
)
FULL = _size(
    replace(
        live_gain.FULL,
        sizes=Sizes((20, 200), (1000, 3000), (8, 64)),
        span_s=16.0,
        settings=cells(DEFAULT, (64, 128, 256, 512, 1024, 2048), (0, 128, 256)),
        cadence={**live_gain.FULL.cadence, "lease_s": 20},
    )
)


@dataclass(frozen=True)
class Killed:
    """The end: setting in force when the controller was killed, the lease it left (s), and when the boot setting was
    seen again (s after the kill)."""

    setting: Setting
    lease_left_s: float
    returned_s: float


def bench(short: bool) -> Iterator[Figure]:
    """share_of_best_sweep, ratio_to_default with its interval, and what they are made of."""
    size = SHORT if short else FULL
    warm()  # or the controller's child compiles it in rounds that count
    with open_ground("rooftune-vllm-gain-") as ground:
        with ground.bed("sweep") as bed:
            swept = sweep(bed, size, bed.greatest_rps(size.sizes, FIRST_SPAN_S, times=2))
            found = _tune(bed, size, swept) if short else None
        if found is None:
            with ground.bed("tuned") as bed:
                found = _tune(bed, size, swept)
    yield from figures(swept, *found)


def _tune(bed: Bed, size: Size, swept: Swept) -> tuple[Tuned, Killed]:
    # After a first round of everything; what the controller will see first is this and the next.
    return tune(bed, size, swept, lambda controller: kill(controller, bed), first_rounds=1)


def kill(controller: Child, bed: Bed) -> Killed:
    """kill -9, and nothing more is done. Raises RefusedError unless the boot setting is back with the lease."""
    controller.stop(signal.SIGKILL)
    killed_s = time.monotonic()
    state = bed.port.state()
    setting, left_s = state.setting(), state.lease.left_s if state.lease is not None else 0.0
    while True:
        state = bed.port.state()
        passed_s = time.monotonic() - killed_s
        if state.lease is None and state.setting() == DEFAULT:
            return Killed(setting, left_s, passed_s)
        if passed_s > left_s + RETURN_SLACK_S:
            raise RefusedError(f"{passed_s:.1f} s after the kill {state.setting()} holds, the lease had {left_s:.1f} s")
        time.sleep(POLL_S)


def figures(swept: Swept, tuned: Tuned, killed: Killed) -> Iterator[Figure]:
    """The two figures first. Raises RefusedError for more pushes than are allowed."""
    if tuned.pushes > MOST_PUSHES:
        raise RefusedError(f"the controller pushed {tuned.pushes} times, {MOST_PUSHES} are allowed")
    share = second_half(tuned)
    relative = share_of_best(swept.attainment, share)
    yield Figure("share_of_best_sweep", relative, "ratio", 0.95)
    # By the mean of its repeats the best of many noisy cells looks better than it is: the true share lies between.
    luckiest = float(np.mean(np.array(swept.attainment), axis=0).max())
    yield Figure("share_of_luckiest_cell", share / max(luckiest, 1e-9), "ratio", 0.95)
    yield from figures_beside_default(swept, tuned)
    yield Figure("attainment_tuned", share, "share", share / relative if relative > 0.0 else None)
    yield Figure("pushes", float(tuned.pushes), "pushes", float(MOST_PUSHES))
    yield Figure("killed_with_budget", float(killed.setting.step_tokens), "tokens", float(BOOT_TOKENS))
    yield Figure("killed_with_chunk_cap", float(killed.setting.chunk_cap_tokens), "tokens")
    yield Figure("boot_setting_returned_s", killed.returned_s, "s", killed.lease_left_s or None)
    yield Figure("target_ttft_s", swept.ttft_s, "s")
    yield Figure("target_longest_gap_s", swept.gap_s, "s")
    for at, setting in enumerate(swept.settings):
        shares = [repeat[at] for repeat in swept.attainment]
        name = f"sweep_b{setting.step_tokens}_cap{setting.chunk_cap_tokens}"
        yield Figure(name, float(np.mean(shares)), f"share, spread {max(shares) - min(shares):.2f}")

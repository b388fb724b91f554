"""From rows to the part of a job: what the child process replays."""

import numpy as np
from rooftune.tuner.control.job import WindowPart
from rooftune.tuner.observe.rows import FINISHED, RequestRows


def window_part(rows: RequestRows, start_s: float) -> WindowPart:
    """Finished requests by arrival, times counted from start_s (engine's clock); rows of another end are left out.

    So are requests without a token of prompt or output, which no twin can replay.
    """
    kept = (rows.ended == FINISHED) & np.isfinite(rows.ttft_s) & np.isfinite(rows.finish_s)
    kept &= (rows.prompt_tokens > 0) & (rows.output_tokens > 0)
    picked = rows.select(kept)
    picked = picked.select(np.lexsort((picked.sequence, picked.arrival_s)))
    return WindowPart(
        arrival_s=tuple((picked.arrival_s - start_s).tolist()),
        ttft_s=tuple(picked.ttft_s.tolist()),
        finish_s=tuple((picked.finish_s - start_s).tolist()),
        longest_gap_s=tuple(np.nan_to_num(picked.longest_gap_s).tolist()),
        prompt_tokens=tuple(picked.prompt_tokens.tolist()),
        cached_tokens=tuple(picked.cached_tokens.tolist()),
        output_tokens=tuple(picked.output_tokens.tolist()),
        gap_count=tuple(picked.gap_count.tolist()),
        gap_bounds_s=picked.gap_bounds_s,
        gap_over=tuple(tuple(row) for row in picked.gap_over.T.tolist()),
    )

"""Names, help and buckets of our Prometheus series; seconds, tokens and shares, as their names say."""

# Targets of 5 ms need steps of half a millisecond around them; beyond a second the shape no longer matters.
GAP_BOUNDS_S = (
    0.0005, 0.001, 0.0015, 0.002, 0.0025, 0.003, 0.0035, 0.004, 0.0045, 0.005, 0.0055, 0.006, 0.007, 0.008, 0.009,
    0.01, 0.012, 0.014, 0.016, 0.018, 0.02, 0.025, 0.03, 0.035, 0.04, 0.05, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5,
    1.0, 2.0, 5.0, 10.0, 30.0,
)  # fmt: skip
WAIT_BOUNDS_S = (
    0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4,
    0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip
STEP_BOUNDS_S = (
    0.00025, 0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03,
    0.04, 0.05, 0.065, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0,
)  # fmt: skip
# Two to an octave: a knee between two of them is placed within 20 %.
COMPUTED_TOKEN_BOUNDS = (
    1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144,
    8192, 12288, 16384, 24576, 32768,
)  # fmt: skip

TTFT = ("rooftune_ttft_seconds", "Arrival to first token, queue included.")
QUEUE = ("rooftune_queue_seconds", "Arrival to first scheduling, of requests that got a token.")
GAP = ("rooftune_gap_seconds", "Gap between neighbouring tokens of one request.")
TPOT = ("rooftune_tpot_seconds", "Per request: (finish - first token) / (output tokens - 1).")
STEP = (
    "rooftune_step_duration_seconds",
    "Duration of a step. computed_tokens: upper bound of the tokens it computed; the lower bound is the next smaller.",
)
STEP_TOKENS = (
    "rooftune_step_computed_tokens",
    "Tokens computed by the steps of rooftune_step_duration_seconds with the same label.",
)
STEP_CONTEXT = (
    "rooftune_step_context_tokens",
    "KV entries read by the steps of rooftune_step_duration_seconds with the same label.",
)

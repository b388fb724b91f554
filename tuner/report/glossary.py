"""The words of the report, for a reader who has never heard of a knee."""

# For the first screen, where a sentence would be too long. What each means in full stands in GLOSSARY.
SHORT: tuple[tuple[str, str], ...] = (
    ("token budget", "most tokens that one step, one pass through the model, may compute"),
    ("chunk cap", "most prompt tokens of one request in a step"),
    ("TTFT", "time to first token, from arrival"),
    ("p99", "99 in 100 are at most this"),
    ("goodput", "requests per second that meet every target"),
    ("KV block", "unit of the memory that holds what the model has read"),
    ("twin", "program that replays your traffic with the engine's scheduling decisions"),
)

GLOSSARY: tuple[tuple[str, str], ...] = (
    (
        "step",
        "The engine works in steps. One step is one pass through the model; it produces one token for every request "
        "that is being answered, and reads a piece of the prompts that are still unread.",
    ),
    (
        "token budget",
        "The most tokens one step may compute, prompt and answer together. Large: prompts are read fast, but everybody "
        "who is being answered waits for the long step. Small: answers flow evenly, prompts take longer.",
    ),
    (
        "chunk cap",
        "The most prompt tokens of one request in one step. It keeps one long prompt from filling every step.",
    ),
    (
        "budget policy, order policy",
        "A budget policy decides for each step how much of the budget it uses; fixed uses all of it. An order policy "
        "decides whose prompt is read first; first come, first served is what engines do. The aging bound is how long "
        "anybody can be passed over.",
    ),
    ("partial-prefill cap", "The most prompts that may be half-read at a time; others wait until one is read."),
    (
        "hook",
        "Rooftune's plugin inside vLLM. It changes knobs while the server runs, brings the policies that vLLM does not "
        "have, and goes back to the flags of the start by itself when nobody renews a change.",
    ),
    ("prefill, decode", "Prefill is reading a prompt; decode is writing the answer, one token per step and request."),
    (
        "floor, slope, knee",
        "A step takes a flat time, the floor, because the model's weights must be read once whatever it computes. "
        "Beyond a number of tokens, the knee, each further token adds time: the slope.",
    ),
    ("TTFT", "Time to first token: from a request's arrival to the first token of its answer, waiting included."),
    ("gap", "The time between two neighbouring tokens of one answer. Long gaps are seen as stutter."),
    ("TPOT", "Time per output token: an answer's time after its first token, divided by its other tokens."),
    ("p50, p99", "Half of the samples are at most the p50; 99 in 100 are at most the p99."),
    ("target", "What you promised: a bound, and which share of the samples must keep it."),
    ("good request, goodput", "A good request finished and met every target. Goodput counts good requests per second."),
    ("feasible", "Over the whole run, every target's quantile is within its bound."),
    (
        "KV pool, KV block",
        "The memory that holds what the model has read so far, handed out in blocks of a few tokens. When it is full, "
        "requests wait or start again.",
    ),
    (
        "twin",
        "A program that replays your traffic through the same scheduling decisions as the engine, with a formula for "
        "the time of each step. It is exact in who is served when, and as good as the formula in how long it takes.",
    ),
    (
        "noise",
        "How much the difference of the two shares would vary with other requests of the same kind: half the width of "
        "its 90 % bootstrap interval. It does not cover an error of the step-time model.",
    ),
    (
        "measured, simulated, assumed, given",
        "Measured: on your engine. Simulated: by the twin. Assumed: a default of ours, because nobody said otherwise. "
        "Given: by your flags or your files.",
    ),
)

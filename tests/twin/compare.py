"""Compares two records of one workload step by step, and says what a workload exercised.

A record is what ``vllm_driver.py`` writes: {"done", "steps": [[plan, preempted, admitted, finished, free_blocks]]}.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

PARTS = ("plan", "preempted", "admitted", "finished", "free_blocks")

Record = dict[str, Any]
Workload = dict[str, Any]


@dataclass(frozen=True)
class Difference:
    """The first place where two records differ."""

    seed: int
    step: int
    part: str
    expected: Any
    found: Any
    context: str

    def __str__(self) -> str:
        return (
            f"workload {self.seed}, step {self.step}, {self.part}: expected {self.expected}, found {self.found}\n"
            f"  {self.context}"
        )


def first_difference(workload: Workload, expected: Record, found: Record) -> Difference | None:
    """The first step and part that differ, or None when both records are identical to the end."""
    seed = workload["seed"]
    for step, (theirs, ours) in enumerate(zip(expected["steps"], found["steps"], strict=False)):
        for part, their_value, our_value in zip(PARTS, theirs, ours, strict=True):
            if their_value != our_value:
                return Difference(seed, step, part, their_value, our_value, _context(workload, expected, step))
    lengths = len(expected["steps"]), len(found["steps"])
    if lengths[0] != lengths[1]:
        return Difference(seed, min(lengths), "length", lengths[0], lengths[1], str(workload["engine"]))
    return None


def _context(workload: Workload, expected: Record, step: int) -> str:
    """Setting in force and who was running and waiting before the step, as the expected record has it."""
    book = _Book(workload)
    for at in range(step):
        book.advance(at, expected["steps"][at])
    book.arrive(step)
    running = ", ".join(f"{name}:{book.computed[name]}/{book.known[name]}" for name in book.running)
    return f"engine {workload['engine']} now {book.setting}; running [{running}]; waiting {book.waiting}"


def summary(differences: Iterable[Difference], total: int) -> str:
    """One line a category, most frequent first, and the share of workloads that are identical."""
    parts = Counter(difference.part for difference in differences)
    lines = [f"{total - parts.total()} of {total} workloads identical ({1 - parts.total() / total:.2%})"]
    lines += [f"  first difference in {part}: {count} ({count / total:.2%})" for part, count in parts.most_common()]
    return "\n".join(lines)


class _Book:
    """Follows a record: known and computed tokens, running and waiting requests. Decides nothing itself."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.requests = workload["requests"]
        self.known = [request["prompt_tokens"] for request in self.requests]
        self.computed = [0] * len(self.requests)
        self.preempted = [False] * len(self.requests)
        self.running: list[int] = []
        self.waiting: list[int] = []
        engine = workload["engine"]
        self.setting = {name: engine[name] for name in ("step_tokens", "chunk_cap_tokens", "max_active")}
        self.changes = {change["step"]: change for change in workload["changes"]}
        self._arrived = 0
        self._computed_content: set[int] = set()

    def arrive(self, step: int) -> None:
        """Changes and arrivals that take effect before this step."""
        if step in self.changes:
            self.setting = {name: self.changes[step][name] for name in self.setting}
        while self._arrived < len(self.requests) and self.requests[self._arrived]["arrive_step"] <= step:
            self.waiting.append(self._arrived)
            self._arrived += 1

    def advance(self, step: int, record: list[Any]) -> set[str]:
        """Books one step; returns what it exercised."""
        self.arrive(step)
        plan, preempted, admitted, finished, _ = record
        seen = set()
        eligible = len(self.running) + len(self.waiting)
        planned = sum(tokens for _, tokens in plan)
        for request in preempted:
            seen.add("preemption")
            self.running.remove(request)
            self.waiting.insert(0, request)
            self.computed[request] = 0
            self.preempted[request] = True
        before = list(self.running)
        for request, hit in admitted:
            self.waiting.remove(request)
            self.running.append(request)
            self.computed[request] = hit
            seen |= self._hit(request, hit)
            if self.preempted[request]:
                seen.add("resumed after preemption" + (" with a prefix hit" if hit else ""))
        served = {request for request, _ in plan}
        if not preempted and any(request not in served for request in before):
            seen.add("running request unserved: budget spent")
            seen |= {"decode unserved" for request in before if request not in served and self._decodes(request)}
        for place, (request, tokens) in enumerate(plan):
            seen |= self._chunk(request, tokens, eligible, place == len(plan) - 1, planned)
            self.computed[request] += tokens
        if self.waiting and not preempted and planned < self.setting["step_tokens"]:
            seen.add(self._why_waiting(eligible))
        for request, _ in plan:
            full = self.computed[request] // self.workload["engine"]["block_size"]
            self._computed_content.update(self.requests[request]["content"][:full])
            if self.computed[request] == self.known[request]:
                self.known[request] += 1
        for request in finished:
            self.running.remove(request)
        return seen

    def _decodes(self, request: int) -> bool:
        prompt_tokens: int = self.requests[request]["prompt_tokens"]
        return self.known[request] > max(self.computed[request], prompt_tokens)

    def _hit(self, request: int, hit: int) -> set[str]:
        """What kind of prefix hit an admission had."""
        if not hit:
            return set()
        blocks = hit // self.workload["engine"]["block_size"]
        content = self.requests[request]["content"]
        seen = {"prefix hit"}
        if blocks > len(content):
            seen.add("prefix hit on produced tokens")
        elif content[blocks - 1] not in self._computed_content:
            seen.add("prefix hit on blocks of the same step")
        if hit + self.workload["engine"]["block_size"] == self.known[request]:
            seen.add("last block of a full hit computed again")
        return seen

    def _chunk(self, request: int, tokens: int, eligible: int, last: bool, planned: int) -> set[str]:
        """Why a request got its tokens."""
        seen = set()
        missing = self.known[request] - self.computed[request]
        cap = self.setting["chunk_cap_tokens"]
        if tokens > 1 and self.known[request] > self.requests[request]["prompt_tokens"]:
            seen.add("recomputation of produced tokens")
        if tokens < missing:
            seen.add("prompt in chunks")
            cut_by_cap = not last or planned < self.setting["step_tokens"]
            if cut_by_cap and tokens == cap:
                seen.add("chunk cap binds")
            elif cut_by_cap and tokens > cap > 0:
                seen.add("adaptive chunk cap binds")
            else:
                seen.add("budget cuts a chunk")
        if 0 < cap < tokens and eligible == 1:
            seen.add("lone request past the chunk cap")
        return seen

    def _why_waiting(self, eligible: int) -> str:
        """Why a request waits although tokens are left and none was preempted."""
        engine, active = self.workload["engine"], self.setting["max_active"]
        if active is not None and len(self.running) >= active:
            return "active cap holds back"
        if len(self.running) >= engine["max_num_seqs"]:
            return "sequence cap holds back"
        if not engine["chunked_prefill"] and self.waiting:
            return "chunking off: whole prompt or KV blocks hold back"
        return "KV blocks hold back"


def coverage(workload: Workload, record: Record) -> set[str]:
    """Everything that a workload exercised, by name."""
    book = _Book(workload)
    seen: set[str] = set()
    for step, row in enumerate(record["steps"]):
        seen |= book.advance(step, row)
    engine, requests = workload["engine"], workload["requests"]
    if record.get("evicted"):
        seen.add("eviction of cached blocks")
    if record.get("duplicates"):
        seen.add("two cached blocks of one content")
    if any(request["output_tokens"] == 1 for request in requests):
        seen.add("output of one token")
    if any(request["prompt_tokens"] % engine["block_size"] == 0 for request in requests):
        seen.add("prompt ends on a block boundary")
    if any(change["step"] < len(record["steps"]) for change in workload["changes"]):
        seen.add("knobs change in mid-run")
    seen.add("prefix caching on" if engine["prefix_caching"] else "prefix caching off")
    seen.add("chunking on" if engine["chunked_prefill"] else "chunking off")
    seen.add("whole-prompt reservation " + ("on" if engine["reserve_full"] else "off"))
    return seen

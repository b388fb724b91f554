"""A hooked vLLM scheduler without a model, stepped by hand on our own clock; runs inside vLLM's environment.

    python driver.py plans < runs.jsonl > plans.jsonl      random runs (``hook_runs.py``), one record each
    python driver.py serve                                  one command a line, one answer a line (``DriverEndpoint``)

Every step takes STEP_S. ``ROOT`` of the project must be on PYTHONPATH.
"""

import json
import random
import sys
import tempfile
import time
from collections import deque
from types import SimpleNamespace

from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import RequestStatus

from rooftune.engine.tuning_source import CHANGES, change, read
from rooftune.engine.vllm.hook import hooked
from rooftune.policies import wire
from tests.twin import vllm_driver as stock

STEP_S = 0.01
FUTURE_S = 1e6  # an arrival that the wall clock has not reached counts as now


class AsyncRecordingScheduler(AsyncScheduler):
    """vLLM's scheduler that plans a step while the one before it runs; notes what the driver reads."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.preempted_now, self.finished_now = [], []


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


class Turned:
    """One scheduler, its clock, and the requests it was given."""

    def __init__(self, engine, model):
        self.clock = Clock()
        plain = stock.RecordingScheduler
        base = AsyncRecordingScheduler if engine.get("ahead") else plain
        stock.RecordingScheduler = hooked(base, lambda: engine.get("version", "0.32.0"), self.clock)
        try:
            self.scheduler = stock.make_scheduler(engine, model)
        finally:
            stock.RecordingScheduler = plain
        self.in_flight = deque()
        self.added = 0
        self.engine = engine
        self.hook = self.scheduler.rooftune
        self.sums_wrong = 0
        self.checks = False  # which also makes the hook look at its notes

    def add(self, index, fields):
        request = stock.make_request(index, fields, self.engine["block_size"])
        request.arrival_time = time.time() + FUTURE_S
        self.scheduler.add_request(request)
        self.added += 1

    def step(self):
        """One step of STEP_S; what was planned. With ``ahead`` the step before it ends while this one is planned."""
        scheduler = self.scheduler
        output = scheduler.schedule()
        scheduler.get_grammar_bitmask(output)  # as vLLM does while its model computes
        planned = dict(output.num_scheduled_tokens)
        if self.engine.get("at_once"):
            self.hook.fold()
        elif self.checks:
            self.check_sums()
        self.in_flight.append((output, self.sampled(planned)))
        most = 1 if self.engine.get("ahead") and planned else 0
        while len(self.in_flight) > most:
            self.land()
        return planned

    def land(self):
        """The oldest step in flight ends."""
        self.clock.now_s += STEP_S
        self.scheduler.update_from_output(*self.in_flight.popleft())

    def sampled(self, planned):
        if not self.engine.get("ahead"):
            return stock.sampled(self.scheduler, planned)
        names = list(planned)
        tokens = [[] if self.scheduler.requests[name].is_prefill_chunk else [stock.PRIVATE] for name in names]
        places = {name: at for at, name in enumerate(names)}
        return ModelRunnerOutput(req_ids=names, req_id_to_index=places, sampled_token_ids=tokens)

    def check_sums(self):
        """The running sums of the records against a count of everything."""
        recorder = self.hook.recorder
        recorder.settle()
        have = recorder.decoders, recorder.context, set(recorder.partials)
        recorder.recount(self.scheduler.running)
        self.sums_wrong += have != (recorder.decoders, recorder.context, set(recorder.partials))


def drive(run, model):
    """One random run: its plans, and what the hook recorded."""
    turned = Turned(run["engine"], model)
    scheduler, desk = turned.scheduler, turned.hook.desk
    turned.checks = not run["engine"].get("waits")
    changes = {change["step"]: change["push"] for change in run["changes"]}
    steps, added = [], 0
    arrivals = run["requests"]
    for step in range(run["max_steps"]):
        if push := changes.get(step):
            wish = {"lease_s": 1e4, "actor": "run", "reason": "a run", "expected_revision": desk.book.revision}
            answer = desk.push(wire.PushRequest.model_validate_json(json.dumps(wish | push)))
            assert isinstance(answer, wire.PushAnswer), answer
        while added < len(arrivals) and arrivals[added]["arrive_step"] <= step:
            turned.add(added, arrivals[added])
            added += 1
        if added == len(arrivals) and not scheduler.requests:
            break
        planned = turned.step()
        steps.append([sorted([int(name), tokens] for name, tokens in planned.items()), sorted(scheduler.preempted_now)])
        scheduler.preempted_now, scheduler.finished_now = [], []
    turned.hook.fold()
    turned.hook.recorder.close_all()
    return {
        "seed": run["seed"],
        "done": added == len(arrivals) and not scheduler.requests,
        "steps": steps,
        "on": turned.hook.on,
        "notes": desk.tuning_state().notes,
        "sums_wrong": turned.sums_wrong,
        "step_rows": json.loads(desk.steps_after(-1).model_dump_json()),
        "request_rows": json.loads(desk.requests_after(-1).model_dump_json()),
    }


ENGINE = {
    "ceiling_tokens": 64, "step_tokens": 64, "chunk_cap_tokens": 0, "adaptive": False, "max_num_seqs": 8,
    "max_active": None, "block_size": 16, "num_blocks": 401, "prefix_caching": True, "chunked_prefill": True,
    "reserve_full": True, "max_model_tokens": 4096,
}  # fmt: skip


def answer(turned, command):
    """One command of ``DriverEndpoint``."""
    what, body = command["do"], command.get("with")
    hook = turned.hook
    hook.fold()
    if what in CHANGES:
        return change(hook.desk, wire.parse(CHANGES[what], body.encode()))[1]
    if what in ("state", "steps", "requests"):
        if what == "requests":
            hook.recorder.close_all()
        return read(hook.desk, what, body or -1)
    if what == "in-flight":
        found = hook.in_flight()
        return "null" if found is None else hook.desk.in_flight(found).model_dump_json()
    if what == "load":
        chance = random.Random(4)
        first = turned.added
        for index in range(first, first + 12):
            fields = {"prompt_tokens": chance.randint(60, 200), "output_tokens": chance.randint(50, 90), "content": []}
            turned.add(index, fields)
    elif what == "add":
        for prompt_tokens, output_tokens in body:
            fields = {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens, "content": []}
            turned.add(turned.added, fields)
    elif what == "run":
        for _ in range(body):
            turned.step()
    elif what == "finish":
        while turned.scheduler.requests or turned.in_flight:
            turned.step()
    elif what == "pass":
        turned.clock.now_s += body
    elif what == "abort":
        turned.scheduler.finish_requests(body, RequestStatus.FINISHED_ABORTED)
    elif what == "break":
        setattr(getattr(hook, body[0]), body[1], None)  # calling it is a TypeError
    elif what == "knobs":
        knobs = SimpleNamespace(scheduler=turned.scheduler, config=turned.scheduler.scheduler_config)
        return json.dumps(
            {
                "budget": knobs.scheduler.max_num_scheduled_tokens,
                "cap": knobs.config.long_prefill_token_threshold,
                "active": knobs.scheduler.max_num_active_reqs,
                "left": len(knobs.scheduler.requests),
            }
        )
    else:
        raise ValueError(what)
    return "null"


def main():
    init_none_hash(sha256)
    with tempfile.TemporaryDirectory() as folder:
        model = stock.tiny_model(4096, folder)
        if sys.argv[1] == "plans":
            for line in sys.stdin:
                print(json.dumps(drive(json.loads(line), model), separators=(",", ":")), file=stock.OUTPUT, flush=True)
            return
        turned = None
        for line in sys.stdin:
            command = json.loads(line)
            if command["do"] == "new":
                turned = Turned(ENGINE | command["with"], model)
                print("null", file=stock.OUTPUT, flush=True)
            else:
                print(answer(turned, command), file=stock.OUTPUT, flush=True)


if __name__ == "__main__":
    main()

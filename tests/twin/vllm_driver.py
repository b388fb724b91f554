"""Drives the scheduler of an installed vLLM 0.32 without a model and writes down what it decides.

Runs inside vLLM's own environment, needs nothing of ours::

    python vllm_driver.py < workloads.jsonl > plans.jsonl

Workloads as in ``workloads.py``. The first line names the version, {"vllm": "0.32.0"}; then for each workload::

    {"seed", "done": all finished before max_steps, "evicted": cached blocks that lost their content,
     "duplicates": blocks cached beside another one of the same content, "steps": [...]}

and for each step ``[plan, preempted, admitted, finished, free_blocks]``: plan [[request, tokens], ...] in the
order of service, preempted [request, ...] in order, admitted [[request, prefix-hit tokens], ...], finished
[request, ...] in the order in which their blocks were freed, free blocks after the decision (before the finished
ones were freed).
"""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR", VLLM_PLUGINS="")
# Only plans may reach stdout; everything that vLLM prints goes to stderr.
OUTPUT = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

import torch  # noqa: E402  (the environment must be set before vLLM is imported)
import vllm  # noqa: E402
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.utils.hashing import sha256  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec  # noqa: E402
from vllm.v1.outputs import ModelRunnerOutput  # noqa: E402
from vllm.v1.request import Request  # noqa: E402
from vllm.v1.structured_output import StructuredOutputManager  # noqa: E402

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": 1 << 30,
    "max_position_embeddings": 1 << 16,
    "torch_dtype": "float32",
}
PRIVATE = 1 << 20  # token ids below are shared content, from here on a request's own


class RecordingScheduler(Scheduler):
    """vLLM's scheduler, unchanged, that notes the order of preemptions and of finished requests."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.preempted_now = []
        self.finished_now = []
        self.evicted = 0
        self.duplicates = 0
        pool = self.kv_cache_manager.block_pool
        cached, evict, insert = pool.cached_block_hash_to_block, pool._maybe_evict_cached_block, pool._insert_block_hash

        def counting_evict(block):
            evicted = evict(block)
            self.evicted += evicted
            return evicted

        def counting_insert(key, block, num_tokens):
            self.duplicates += cached.get_one_block(key) is not None
            insert(key, block, num_tokens=num_tokens)

        pool._maybe_evict_cached_block, pool._insert_block_hash = counting_evict, counting_insert

    def _preempt_request(self, request, *args, **kwargs):
        self.preempted_now.append(int(request.request_id))
        super()._preempt_request(request, *args, **kwargs)

    def _free_request(self, request, *args, **kwargs):
        self.finished_now.append(int(request.request_id))
        return super()._free_request(request, *args, **kwargs)


def tiny_model(max_model_len: int, folder: str) -> ModelConfig:
    """A model configuration from a local file; neither hub nor tokenizer."""
    Path(folder, "config.json").write_text(json.dumps(MODEL))
    return ModelConfig(
        model=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=max_model_len, seed=0, enforce_eager=True
    )


def make_scheduler(engine: dict, model: ModelConfig) -> RecordingScheduler:
    """A scheduler as the engine would build it: one full-attention group, one rank, no connector, not async."""
    model.max_model_len = engine["max_model_tokens"]
    scheduler_config = SchedulerConfig(
        max_num_seqs=engine["max_num_seqs"],
        max_num_active_seqs=engine["max_active"],
        max_num_batched_tokens=engine["ceiling_tokens"],
        max_num_scheduled_tokens=engine["step_tokens"],
        max_model_len=engine["max_model_tokens"],
        long_prefill_token_threshold=engine["chunk_cap_tokens"],
        long_prefill_token_threshold_adaptive=engine["adaptive"],
        enable_chunked_prefill=engine["chunked_prefill"],
        scheduler_reserve_full_isl=engine["reserve_full"],
        watermark=0.0,
        is_encoder_decoder=False,
        async_scheduling=False,
    )
    cache_config = CacheConfig(block_size=engine["block_size"], enable_prefix_caching=engine["prefix_caching"])
    config = VllmConfig(
        model_config=model,
        cache_config=cache_config,
        scheduler_config=scheduler_config,
        device_config=DeviceConfig("cpu"),
    )
    cache_config.num_gpu_blocks = engine["num_blocks"]
    # vLLM's configuration may correct itself silently; then the comparison would be about something else.
    assert scheduler_config.enable_chunked_prefill == engine["chunked_prefill"]
    assert scheduler_config.max_num_batched_tokens == engine["ceiling_tokens"]
    assert cache_config.enable_prefix_caching == engine["prefix_caching"]
    assert cache_config.block_size == engine["block_size"]
    spec = FullAttentionSpec(block_size=engine["block_size"], num_kv_heads=1, head_size=1, dtype=torch.float32)
    kv_cache = KVCacheConfig(
        num_blocks=engine["num_blocks"], kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    return RecordingScheduler(
        config, kv_cache, StructuredOutputManager(config), block_size=engine["block_size"], log_stats=False
    )


def make_request(index: int, fields: dict, block_size: int) -> Request:
    """Tokens of a full prompt block are its content id; the rest is the request's own."""
    tokens = [content for content in fields["content"] for _ in range(block_size)]
    tokens += [PRIVATE + index] * (fields["prompt_tokens"] - len(tokens))
    return Request(
        request_id=str(index),
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=fields["output_tokens"], ignore_eos=True),
        pooling_params=None,
        block_hasher=get_request_block_hasher(block_size, sha256),
    )


def sampled(scheduler: RecordingScheduler, planned: dict) -> ModelRunnerOutput:
    """What a model would return: one token for each request whose known tokens are now all computed."""
    tokens = []
    for name in planned:
        request = scheduler.requests[name]
        complete = request.num_computed_tokens == request.num_tokens
        tokens.append([PRIVATE + int(name)] if complete else [])
    names = list(planned)
    return ModelRunnerOutput(
        req_ids=names, req_id_to_index={name: at for at, name in enumerate(names)}, sampled_token_ids=tokens
    )


def drive(workload: dict, model: ModelConfig) -> dict:
    """Run one workload to its end or to its bound."""
    engine, arrivals = workload["engine"], workload["requests"]
    scheduler = make_scheduler(engine, model)
    changes = {change["step"]: change for change in workload["changes"]}
    steps, added = [], 0
    for step in range(workload["max_steps"]):
        if change := changes.get(step):
            scheduler.max_num_scheduled_tokens = change["step_tokens"]
            scheduler.scheduler_config.long_prefill_token_threshold = change["chunk_cap_tokens"]
            scheduler.max_num_active_reqs = change["max_active"] or engine["max_num_seqs"]
        while added < len(arrivals) and arrivals[added]["arrive_step"] <= step:
            scheduler.add_request(make_request(added, arrivals[added], engine["block_size"]))
            added += 1
        if added == len(arrivals) and not scheduler.requests:
            break
        waiting_before = {request.request_id for request in scheduler.waiting}
        output = scheduler.schedule()
        planned = dict(output.num_scheduled_tokens)
        admitted = [
            [int(name), scheduler.requests[name].num_computed_tokens - tokens]
            for name, tokens in planned.items()
            if name in waiting_before
        ]
        free_blocks = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        scheduler.update_from_output(output, sampled(scheduler, planned))
        plan = [[int(name), tokens] for name, tokens in planned.items()]
        steps.append([plan, scheduler.preempted_now, admitted, scheduler.finished_now, free_blocks])
        scheduler.preempted_now, scheduler.finished_now = [], []
    done = added == len(arrivals) and not scheduler.requests
    counts = {"evicted": scheduler.evicted, "duplicates": scheduler.duplicates}
    return {"seed": workload["seed"], "done": done, **counts, "steps": steps}


def main() -> None:
    init_none_hash(sha256)
    print(json.dumps({"vllm": vllm.__version__}), file=OUTPUT)
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model(4096, folder)
        for line in sys.stdin:
            print(json.dumps(drive(json.loads(line), model), separators=(",", ":")), file=OUTPUT)
    OUTPUT.flush()


if __name__ == "__main__":
    main()

"""Tiny random models of each family, float32, and what transformers' own ``generate`` says they answer."""

import os
from copy import deepcopy
from functools import cache

import torch
from transformers import (
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from rooftune.engine.torch.load import make_runner
from rooftune.engine.torch.runner import TorchRunner

VOCABULARY = 211
# `make gpu-check` runs the equality tests on a card.
DEVICE = os.environ.get("ROOFTUNE_TEST_DEVICE", "cpu")
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 96,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 8192,
    "initializer_range": 0.3,  # with the usual 0.02 a random model repeats one token forever
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**_SHAPE),
    "llama-one-group": LlamaConfig(**(_SHAPE | {"num_key_value_heads": 6})),
    "llama-rope-scaled": LlamaConfig(
        **_SHAPE,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "qwen2": Qwen2Config(**_SHAPE),
    "qwen2-mixed-window": Qwen2Config(**_SHAPE, use_sliding_window=True, sliding_window=20, max_window_layers=1),
    "qwen3": Qwen3Config(**_SHAPE),
    "mistral": MistralConfig(**_SHAPE, sliding_window=None),
    "mistral-window": MistralConfig(**_SHAPE, sliding_window=24),
}


@cache
def reference(name: str) -> PreTrainedModel:
    """The model with transformers' own attention."""
    torch.manual_seed(len(name))
    model = AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="sdpa", dtype=torch.float32)
    return model.to(DEVICE).eval()


def runner(name: str, *, kv_blocks: int = 128, block_tokens: int = 16) -> TorchRunner:
    """A fresh runner with the same weights."""
    source = reference(name)
    model = AutoModelForCausalLM.from_config(deepcopy(source.config), dtype=torch.float32)
    model.load_state_dict(source.state_dict())
    return make_runner(model.to(DEVICE), name=name, kv_blocks=kv_blocks, block_tokens=block_tokens)


@torch.no_grad()
def generated(model: PreTrainedModel, prompt: list[int], tokens: int) -> list[int]:
    """Greedy continuation by transformers, ``tokens`` long."""
    ids = torch.tensor([prompt], device=model.device)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens
    )
    return out[0, len(prompt) :].tolist()

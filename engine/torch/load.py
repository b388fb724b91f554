"""Loads a causal language model and makes a runner of it with a device, a dtype and a KV store."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from huggingface_hub.errors import (  # type: ignore[import-not-found, unused-ignore] # absent beside the type checker
    StrictDataclassError,
)
from jinja2.exceptions import TemplateError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from rooftune.engine.step import ModelFacts
from rooftune.engine.torch.attention import NAME as ATTENTION
from rooftune.engine.torch.kv_store import KvStore
from rooftune.engine.torch.linear import can_pack, pack_linears
from rooftune.engine.torch.runner import TorchRunner
from rooftune.policies.errors import InfeasibleError, InputError, bad_value

# On a CPU other programs need memory as well: take a quarter of what is free, and no more than this.
CPU_SHARE = 0.25
CPU_MOST_BYTES = 2 << 30
MOST_RUNNING = 256
# On a CUDA card the rest is for activations, logits and the allocator's own gaps.
CUDA_SHARE = 0.80


def free_bytes(device: torch.device) -> int:
    """Memory that can still be allocated on ``device``, in bytes; on a CPU the smaller of machine and container."""
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        return free
    return min(_machine_free(), _container_free())


def auto_kv_blocks(
    device: torch.device, block_bytes: int, max_model_tokens: int, block_tokens: int, max_running: int = MOST_RUNNING
) -> int:
    """KV blocks for ``--kv-blocks auto``: by free memory, at most what ``max_running`` requests of full length need.

    block_bytes: one block over all layers. Raises InfeasibleError when not even one block fits.
    """
    free = free_bytes(device)
    usable = free * CUDA_SHARE if device.type == "cuda" else min(free * CPU_SHARE, CPU_MOST_BYTES)
    blocks = min(int(usable // block_bytes), max_running * -(-max_model_tokens // block_tokens))
    if blocks < 1:
        raise InfeasibleError(
            f"{free} bytes are free on {device}, one KV block needs {block_bytes}; free memory or take a smaller model"
        )
    return blocks


def _machine_free() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return CPU_MOST_BYTES


def _container_free() -> int:
    """What the control group leaves (version 2, else version 1); unlimited reads as a very large number."""
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        if Path(limit).exists() and Path(used).exists():
            text = Path(limit).read_text().strip()
            if text != "max":
                return max(0, int(text) - int(Path(used).read_text()))
    return 1 << 62


# Families whose attention is ours to replace: causal, grouped heads, at most a sliding window.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
# Rotary embeddings that depend on a token's position alone. The others ("dynamic", "longrope") look at the longest
# request of the step, so a request's output would depend on its neighbours.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEFAULT_BLOCK_TOKENS = 16


def load_runner(
    source: str,
    *,
    device: str = "auto",
    dtype: str = "auto",
    kv_blocks: int | None = None,
    block_tokens: int = DEFAULT_BLOCK_TOKENS,
    max_running: int = MOST_RUNNING,
    max_model_tokens: int = 0,
) -> TorchRunner:
    """A runner for the model in folder ``source`` (or of that name on the hub or in its cache).

    device: auto, cpu, cuda or cuda:N. dtype: auto, float32, bfloat16 or float16. kv_blocks: None: as many as
    fit, at most what ``max_running`` requests of ``max_model_tokens`` (0: the model's own length) need.
    Raises InputError when the source, the device or the dtype cannot be used, InfeasibleError when no KV block fits.
    """
    place = choose_device(device)
    kind = choose_dtype(dtype, place)
    config = read_config(source)
    check_config(config, source)
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            source, config=config, dtype=kind, attn_implementation=ATTENTION, output_loading_info=True
        )
    except (OSError, SafetensorError, RuntimeError) as error:
        raise InputError(f"the weights of {source!r} cannot be loaded: {_first_line(error)}; fetch it again") from error
    if report["missing_keys"]:
        some = ", ".join(sorted(report["missing_keys"])[:3])
        count = len(report["missing_keys"])
        raise InputError(f"the weights of {source!r} lack {count} tensors ({some}); fetch it again")
    # The model is ours alone, so its weights may change their layout.
    if kv_blocks is None:
        own = int(config.max_position_embeddings)
        longest = min(own, max_model_tokens) if max_model_tokens else own
        block_bytes = block_tokens * kv_bytes_per_token(config, kind)
        kv_blocks = auto_kv_blocks(place, block_bytes, longest, block_tokens, max_running)
    return make_runner(model.to(place), name=source, kv_blocks=kv_blocks, block_tokens=block_tokens, pack=True)


def make_runner(
    model: PreTrainedModel,
    *,
    name: str,
    kv_blocks: int | None = None,
    block_tokens: int = DEFAULT_BLOCK_TOKENS,
    pack: bool = False,
) -> TorchRunner:
    """A runner for a model that is in memory already, on its device and in its dtype; sets its attention to ours.

    pack: give its linear layers the layout of ``engine/torch/linear.py`` where that helps; then only this runner can
    run the model.
    """
    config = model.config
    check_config(config, name)
    model.set_attn_implementation(ATTENTION)
    model.eval()
    layers, kv_heads, head_dim = _attention_shape(config)
    if block_tokens < 1:
        raise bad_value("block size", block_tokens, "at least 1 token", "16 is usual")
    most_tokens = int(config.max_position_embeddings)
    parameters = sum(weight.numel() for weight in model.parameters())
    if pack and can_pack(model):
        pack_linears(model)
    if kv_blocks is None:
        block_bytes = block_tokens * kv_bytes_per_token(config, model.dtype)
        kv_blocks = auto_kv_blocks(model.device, block_bytes, most_tokens, block_tokens)
    store = KvStore(
        layers=layers,
        blocks=kv_blocks,
        block_tokens=block_tokens,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=model.dtype,
        device=model.device,
    )
    facts = ModelFacts(
        name=name,
        parameters=parameters,
        vocab_tokens=int(config.vocab_size),
        max_model_tokens=most_tokens,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        kv_blocks=kv_blocks,
        block_tokens=block_tokens,
        eos_token_ids=_eos_token_ids(model),
    )
    return TorchRunner(model, store, facts)


def load_tokenizer(source: str) -> PreTrainedTokenizerBase:
    """The tokenizer beside the model. Raises InputError when there is none."""
    try:
        return AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise InputError(f"{source!r} has no usable tokenizer: {_first_line(error)}; add tokenizer.json") from error


def read_config(source: str) -> PretrainedConfig:
    """The model's config.json. Raises InputError when it is not there or not readable."""
    if source.startswith(("/", "./", "../", "~")) and not Path(source).exists():
        raise InputError(
            f"there is no folder {source!r}; rooftune make-model DIR makes one, rooftune get-model brings one"
        )
    try:
        return AutoConfig.from_pretrained(source)
    except (OSError, ValueError, StrictDataclassError) as error:
        raise InputError(
            f"{source!r} is not a model: {_first_line(error)}; give a folder with config.json (rooftune make-model DIR "
            "makes one, rooftune get-model smollm2-135m DIR brings a real one) or a name on the hub"
        ) from error


def check_config(config: PretrainedConfig, name: str) -> None:
    """Raises InputError for a model that our attention would compute wrongly."""
    if config.model_type not in FAMILIES:
        raise bad_value(f"family of {name!r}", config.model_type, f"one of {', '.join(FAMILIES)}", "take another model")
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") not in ROPE_TYPES:
        raise bad_value(
            f"rotary embedding of {name!r}", rope["rope_type"], f"one of {', '.join(ROPE_TYPES)}", "take another model"
        )
    if getattr(config, "quantization_config", None):
        raise InputError(f"{name!r} is quantized; give the model in float32, bfloat16 or float16")


def choose_device(device: str) -> torch.device:
    """``auto`` is CUDA where there is a card, else the CPU. Raises InputError."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or (index and not (kind == "cuda" and index.isdecimal())):
        raise bad_value("device", device, "auto, cpu, cuda or cuda:N", "leave it out to choose by itself")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise InputError(f"device {device!r}: torch sees {torch.cuda.device_count()} CUDA cards; use --device cpu")
    return torch.device(device)


def choose_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """``auto`` is bfloat16 where the device computes it, else float16 on CUDA, float32 on a CPU. Raises InputError."""
    if dtype == "auto":
        if device.type == "cuda":
            return torch.bfloat16 if torch.cuda.get_device_capability(device)[0] >= 8 else torch.float16
        abilities = torch.cpu.get_capabilities()
        return torch.bfloat16 if abilities.get("avx512_bf16") or abilities.get("amx_bf16") else torch.float32
    if dtype not in DTYPES:
        raise bad_value("dtype", dtype, f"auto or one of {', '.join(DTYPES)}", "leave it out to choose by itself")
    return DTYPES[dtype]


def kv_bytes_per_token(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """Keys and values of all layers."""
    layers, kv_heads, head_dim = _attention_shape(config)
    return 2 * layers * kv_heads * head_dim * int(dtype.itemsize)


def _attention_shape(config: PretrainedConfig) -> tuple[int, int, int]:
    """Layers, key heads, width of a head."""
    heads = int(config.num_attention_heads)
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return int(config.num_hidden_layers), int(config.num_key_value_heads or heads), int(width)


def _eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    generation = getattr(model, "generation_config", None)
    found = getattr(generation, "eos_token_id", None)
    if found is None:
        found = model.config.eos_token_id
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list) else (int(found),)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


# A template is a program that came with the model.
_FAILURES = (TemplateError, ValueError, TypeError, ArithmeticError, LookupError, AttributeError, RecursionError)


class ModelTokenizer:
    """Implements ``rooftune.engine.server.stream.Tokenizer``. Raises InputError for a tokenizer without a Rust part."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_tokens: int) -> None:
        self.vocab_tokens = vocab_tokens
        self._whole = tokenizer
        fast = getattr(tokenizer, "backend_tokenizer", None)
        if fast is None:
            raise InputError("this model's tokenizer has no fast form; save it with a tokenizer.json")
        self._fast = fast
        # transformers sets these in every call, where two threads would race; here they are set once.
        self._fast.no_truncation()
        self._fast.no_padding()

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        # The plain ``encode`` keeps the GIL to its end, and with it every stream: longer than a step for a long
        # document. This one gives it free.
        ids: list[int] = self._fast.encode_batch_fast([text], add_special_tokens=special)[0].ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._fast.decode(list(token_ids), skip_special_tokens=True)
        return text

    def chat_text(self, messages: Sequence[Mapping[str, str]]) -> str:
        if not self._whole.chat_template:
            raise InputError("this model has no chat template; use /v1/completions")
        try:
            text: str = self._whole.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        except _FAILURES as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise InputError(f"the model's chat template refuses these messages: {reason[:200]}") from error
        return text

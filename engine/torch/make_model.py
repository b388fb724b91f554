"""Makes a small model with random weights and a tokenizer of its own: load for a machine without a download.

Its words mean nothing; its steps cost what a real model of that shape costs.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rooftune.engine.catalog import check_target
from rooftune.policies.errors import bad_value

COMMON_WORDS = (
    "the of and to a in is that it was for on are as with his they at be this from have or by one had not but "
    "what all were when we there can an your which their said if do will each about how up out them then she many "
    "some so these would other into has more her two like him see time could no make than first been its who now "
    "people my made over did down only way find use may water long little very after words called just where most "
    "know get through back much before go good new write our used me man too any day same right look think also "
    "around another came come work three word must because does part even place well such here take why things "
    "help put years different away again off went old number great tell men say small every found still between "
    "name should home big give air line set own under read last never us left end along while might next sound "
    "below saw something thought both few those always looked show large often together asked house world going "
    "want school important until form food keep children feet land side without boy once animals life enough took"
).split()
_ONSETS = "b bl br c ch cl cr d dr f fl fr g gl gr h j k l m n p pl pr qu r s sc sh sl sp st str t th tr v w".split()
_NUCLEI = "a e i o u ai ea ee ie oa ou".split()
_CODAS = ["", "", *"n r s t l m d ck nd ng nt rd ss st tion ly er ing".split()]
_SENTENCE_ENDS = [".", ".", ".", "?", "!", ";", ":"]


def made_up_text(seed: int, *, rare_words: int, sentences: int) -> Iterator[str]:
    """``sentences`` sentences of common English and ``rare_words`` invented words, the frequent ones more often."""
    chance = random.Random(seed)
    words = list(COMMON_WORDS)
    for _ in range(rare_words):
        parts = chance.randint(1, 3)
        syllables = [chance.choice(_ONSETS) + chance.choice(_NUCLEI) for _ in range(parts)]
        words.append("".join(syllables) + chance.choice(_CODAS))
    frequency = [1.0 / (rank + 10) for rank in range(len(words))]  # Zipf's law, flattened at the top
    for _ in range(sentences):
        chosen = chance.choices(words, weights=frequency, k=chance.randint(4, 18))
        if chance.random() < 0.1:
            chosen.append(str(chance.randint(0, 10_000)))
        yield " ".join(chosen).capitalize() + chance.choice(_SENTENCE_ENDS)


PAD, START, END = "<|pad|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of a made model; vocab_tokens is the most the tokenizer may learn."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    vocab_tokens: int


SHAPES = {
    "tiny": Shape(layers=2, hidden=64, inner=192, heads=4, kv_heads=2, vocab_tokens=1024),
    "small": Shape(layers=12, hidden=384, inner=1024, heads=6, kv_heads=2, vocab_tokens=8192),
    "medium": Shape(layers=24, hidden=640, inner=1728, heads=10, kv_heads=5, vocab_tokens=8192),
    "large": Shape(layers=24, hidden=1024, inner=2816, heads=16, kv_heads=4, vocab_tokens=8192),
}


def make_model(target: Path, *, size: str, seed: int, max_model_tokens: int = 8192) -> int:
    """Write a made model into ``target``, weights in bfloat16; returns its number of parameters.

    The same arguments give the same weights and the same tokenizer. Raises InputError for an unknown size, a
    bound broken or a target that is not empty.
    """
    if size not in SHAPES:
        raise bad_value("size", size, f"one of {', '.join(SHAPES)}", "small is a good start")
    if not 0 <= seed < 2**63:
        raise bad_value("seed", seed, "within 0..2**63 - 1", "any number will do")
    if not 16 <= max_model_tokens <= 1 << 20:
        raise bad_value("max_model_tokens", max_model_tokens, "within 16..1048576", "8192 is usual")
    check_target(target)
    shape = SHAPES[size]
    tokenizer = train_tokenizer(shape.vocab_tokens, seed, max_model_tokens)
    model = random_llama(shape, len(tokenizer), seed, max_model_tokens)
    target.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(target)
    tokenizer.save_pretrained(target)
    return sum(weight.numel() for weight in model.parameters())


def llama_config(shape: Shape, vocab_tokens: int, max_model_tokens: int, **more: Any) -> LlamaConfig:
    """A Llama of that shape; more: as ``LlamaConfig`` names them."""
    return LlamaConfig(
        vocab_size=vocab_tokens,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=max_model_tokens,
        **more,
    )


def random_llama(shape: Shape, vocab_tokens: int, seed: int, max_model_tokens: int) -> LlamaForCausalLM:
    """A Llama of that shape with random weights, float32; token ids 0, 1, 2 are padding, start and end."""
    token_ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = llama_config(shape, vocab_tokens, max_model_tokens, tie_word_embeddings=True, **token_ids)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def train_tokenizer(vocab_tokens: int, seed: int, max_model_tokens: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on made-up text, with a chat template; it encodes any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_tokens,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = made_up_text(seed, rare_words=vocab_tokens, sentences=2 * vocab_tokens)
    tokenizer.train_from_iterator(text, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=START,
        eos_token=END,
        model_max_length=max_model_tokens,
        chat_template=CHAT_TEMPLATE,
    )

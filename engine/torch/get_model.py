"""Writes a packaged GGUF model as a plain model folder: weights, config, tokenizer, chat template."""

import importlib.util
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from rooftune.engine.catalog import PackagedModel, check_target, find_packaged
from rooftune.policies.errors import InputError

# What transformers needs to read a GGUF file, by module name.
_READERS = {"gguf": "gguf", "sentencepiece": "sentencepiece", "google.protobuf": "protobuf", "accelerate": "accelerate"}


def get_model(name: str, target: Path) -> PackagedModel:
    """Unpack the model ``name`` into ``target``, in bfloat16; returns what it is and its licence.

    Raises InputError for an unknown name, a missing package or a target that is not empty.
    """
    packaged, path = find_packaged(name)
    check_target(target)
    missing = [package for module, package in _READERS.items() if not _installed(module)]
    if missing:
        raise InputError(f"reading {path.name} needs more packages; run: pip install {' '.join(missing)}")
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    # In float32 first: that is what the file's own reader computes in.
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    # The weights are plain numbers by now; with these left in place the folder would claim to be quantized.
    if getattr(model, "hf_quantizer", None) is not None:
        del model.hf_quantizer
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.name_or_path = packaged.name
    model.to(torch.bfloat16)
    target.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    (target / "LICENCE.txt").write_text(f"{packaged.source}\nLicence: {packaged.licence}\n")
    return packaged


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def quiet() -> None:
    """For the rest of the process: errors only, no progress bars."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()

"""``--hf``: causal language models of transformers, from a config or a local folder; nothing is downloaded.

A file is a config, for random weights. A folder has a ``config.json``; weights and a tokenizer are used if they are
there. Without a tokenizer, tokens are the bytes of the text. Config and tokenizer are copied to ``hf`` in the run's
folder, where ``fairshard consolidate`` finds them.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fairshard.checkpoint.consolidate import BESIDE_CONFIG, CONFIG
from fairshard.cli.options import OptionError, refused

SAVED = "hf"
"""Folder of a run that holds config and tokenizer."""

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


@dataclass(frozen=True)
class CausalLM:
    """A model with fp32 weights; ``random`` are the names of those that the folder lacks."""

    model: nn.Module
    name: str
    vocab_size: int
    random: tuple[str, ...] = ()

    @property
    def has_cache(self) -> bool:
        """Whether its forward takes ``use_cache``."""
        return "use_cache" in inspect.signature(self.model.forward).parameters


def make_model(path: Path, context: int) -> CausalLM:
    """The causal language model of the config ``path``, or of the folder; on the meta device without its weights.

    Raises:
        OptionError: it is of another kind, or for shorter sequences.
    """
    config = read_config(path)
    from transformers import AutoModelForCausalLM

    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise OptionError(f"--hf must be a causal language model, but {path} is a {type(config).__name__}.")
    text_config = config.get_text_config()
    most = getattr(text_config, "max_position_embeddings", None)
    if isinstance(most, int) and context > most:
        raise OptionError(f"--context must be at most {most}, the positions of {path}, but is {context}.")
    vocab_size = int(text_config.vocab_size)
    has_weights = any(os.path.isfile(path / name) for name in _WEIGHTS)
    if not has_weights or torch.get_default_device().type == "meta":
        model, missing = random_model(config), []
    else:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=torch.float32, local_files_only=True, trust_remote_code=False,
            output_loading_info=True,
        )  # fmt: skip
        model, missing = loaded[0], sorted(loaded[1]["missing_keys"])
    model.train()
    settings: Any = model.config
    settings.architectures = [type(model).__name__]  # sharding in place changes the class
    origin = "weights" if has_weights else "random weights"
    return CausalLM(model, f"{type(model).__name__} of {path}, {origin}", vocab_size, tuple(missing))


def read_config(path: Path) -> Any:
    """The config in the file or folder ``path``.

    Raises:
        OptionError: transformers is missing, or cannot read it.
    """
    file = path / CONFIG if os.path.isdir(path) else path
    if not os.path.isfile(file):
        raise OptionError(f"--hf must be a config file or a folder with a {CONFIG}, but {path} has none.")
    if importlib.util.find_spec("transformers") is None:
        raise OptionError("--hf needs transformers. Run: pip install 'fairshard[hf]'")
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported
    from transformers import AutoConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with refused(f"--hf {path} cannot be read: ", Exception):  # a hostile config can raise anything
        return AutoConfig.from_pretrained(file, trust_remote_code=False, local_files_only=True)


def random_model(config: Any) -> nn.Module:
    """A model with random fp32 weights: a causal LM if there is one of this config, otherwise the base model."""
    from transformers import AutoModel, AutoModelForCausalLM

    is_causal = type(config) in AutoModelForCausalLM._model_mapping
    kind: Any = AutoModelForCausalLM if is_causal else AutoModel
    made: nn.Module = kind.from_config(config, dtype=torch.float32)
    return made


def tokenizer_beside(path: Path, vocab_size: int | None = None) -> Any | None:
    """The tokenizer in the folder of the config; None if there is none.

    Raises:
        OptionError: it cannot be read, or has a token that a model of ``vocab_size`` tokens does not know.
    """
    folder = path if os.path.isdir(path) else path.parent
    if not any(os.path.isfile(folder / name) for name in _TOKENIZER):
        return None
    from transformers import AutoTokenizer

    with refused(f"the tokenizer in {folder} cannot be read: ", Exception):  # it may raise anything
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    largest = max(tokenizer.get_vocab().values(), default=0)
    if vocab_size is not None and largest >= vocab_size:
        raise OptionError(
            f"the tokenizer in {folder} has token {largest}, but the model has a vocabulary of {vocab_size}. "
            "Pass the tokenizer of this model."
        )
    return tokenizer


def byte_tokenizer(context: int) -> Any:
    """A tokenizer whose ids are the bytes of the text in UTF-8."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    made = Tokenizer(BPE(vocab={char: byte for byte, char in bytes_to_unicode().items()}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=context, clean_up_tokenization_spaces=False)


def save_beside(folder: Path, path: Path, model: nn.Module, context: int) -> None:
    """Write the config, generation config and tokenizer of ``model``, which came from ``path``, into a new folder."""
    config: Any = model.config
    config.save_pretrained(folder)
    generation: Any = getattr(model, "generation_config", None)
    source = path if os.path.isdir(path) else path.parent
    if tokenizer_beside(path) is None:
        if generation is not None:  # a byte is no special token
            generation.bos_token_id = generation.eos_token_id = generation.pad_token_id = None
        byte_tokenizer(context).save_pretrained(folder)
    else:
        for name in BESIDE_CONFIG:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
    if generation is not None:
        generation.save_pretrained(folder)

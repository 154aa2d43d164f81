"""Hugging Face models with random weights, wrapped by class, train as under DDP, can be saved, and generate."""

import copy
import os
import subprocess
import sys
import warnings
import zlib

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fairshard.checkpoint import save
from fairshard.engine.tree import units_below
from fairshard.errors import FairshardError, ParameterShardedError
from fairshard.nn import FSDP, fully_shard, register_forward_method
from fairshard.nn.wrap import ModuleWrapPolicy
from tests.kit import rank_device, run_ranks
from tests.on_ranks import in_full, on_ranks
from tests.reference import assert_same_state

pytest.importorskip("transformers")
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

VOCAB = 61
SPECIAL = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}


def gpt2():
    """A GPT-2 of two blocks, whose embedding is tied to its output layer."""
    sizes = {"n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout, **SPECIAL)), GPT2Block


def llama():
    """A Llama of two layers with grouped heads."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "max_position_embeddings": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **SPECIAL)), LlamaDecoderLayer


MODELS = {"gpt2": gpt2, "llama": llama}
names = pytest.mark.parametrize("name", list(MODELS))


def built(name):
    """The model, the same on every rank, and the class of its blocks."""
    torch.manual_seed(3)
    model, block = MODELS[name]()
    return model.to(rank_device()), block


def tokens(*key):
    """Two sequences that depend on ``key`` only."""
    random = torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))
    return torch.randint(2, VOCAB, (2, 9), generator=random, device="cpu").to(rank_device())


def train(model):
    """Losses of four steps of AdamW, on this rank's tokens."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    ids = tokens(dist.get_rank())
    for _ in range(4):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


@on_ranks(2)
@names
@pytest.mark.parametrize("options", [{}, {"use_orig_params": True}], ids=["flat", "orig"])
def test_it_trains_as_under_ddp(name, options):
    """Each block a unit: the losses are DDP's, to the bit."""
    model, block = built(name)
    expected = train(DistributedDataParallel(copy.deepcopy(model)))
    losses = train(FSDP(model, auto_wrap_policy=ModuleWrapPolicy({block}), **options))
    torch.testing.assert_close(losses, expected, rtol=0, atol=0)
    assert losses[-1] < losses[0]


@on_ranks(2)
@names
@pytest.mark.parametrize("door", ["wrapper", "fully_shard"])
def test_caches_are_looked_into(name, door):
    """Outputs with a key-value cache leave nothing gathered and warn of nothing; a backward through a cache works."""
    model, block = built(name)
    plain = copy.deepcopy(model)
    if door == "wrapper":
        model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({block}))
    else:
        for part in [part for part in model.modules() if isinstance(part, block)]:
            fully_shard(part)
        fully_shard(model)
    ids = tokens(dist.get_rank())
    losses = []
    for net in (model, plain):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*cannot look into")
            output = net(input_ids=ids, labels=ids, use_cache=True)
        loss = output.loss + output.past_key_values.layers[0].keys.square().sum()
        loss.backward()
        losses.append(loss.detach())
        with torch.no_grad():
            cache = net(input_ids=ids, use_cache=True).past_key_values
            losses.append(net(input_ids=ids[:, :1], past_key_values=cache).logits)
            assert cache.get_seq_length() == ids.shape[1] + 1
    assert not any(unit.is_gathered or unit.is_hidden for _, unit in units_below(model))
    for own, expected in zip(losses[:2], losses[2:], strict=True):
        torch.testing.assert_close(own, expected, rtol=0, atol=0)


def _train_and_save(name, folder):
    """Train sharded and save; return the sharded model's logits for a prompt and the tokens it generates."""
    model, block = built(name)
    wrapped = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({block}))
    register_forward_method(wrapped, "generate")
    train(wrapped)
    save(f"{folder}/step", wrapped)
    if dist.get_rank() == 0:
        model.config.save_pretrained(f"{folder}/config")
    prompt = tokens("prompt")
    with torch.no_grad():
        logits = wrapped.eval()(input_ids=prompt).logits
        text = wrapped.generate(input_ids=prompt, max_new_tokens=6, do_sample=False, synced_gpus=True)
    return logits.cpu(), text.cpu()


@on_ranks(2)
@names
def test_the_wrapper_looks_like_the_model(name, tmp_path):
    """Its attributes are the model's, what only the wrapper can save is refused by name, and new embeddings raise."""
    model, block = built(name)
    expected = copy.deepcopy(model)
    wrapped = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({block}))
    for attribute in ("config", "generation_config", "base_model_prefix"):
        assert getattr(wrapped, attribute) is getattr(model, attribute)
    assert (wrapped.device, wrapped.dtype) == (expected.device, expected.dtype)
    if dist.get_rank() == 0:
        with pytest.raises(ParameterShardedError, match=r"state_dict=\.\.\."):
            wrapped.save_pretrained(tmp_path)
    state = wrapped.state_dict()
    if dist.get_rank() == 0:
        wrapped.save_pretrained(tmp_path, state_dict=state)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
        assert_same_state(loaded, {name: value.cpu() for name, value in expected.state_dict().items()})
    model.set_input_embeddings(torch.nn.Embedding(VOCAB, 16, device=rank_device()))
    with pytest.raises(FairshardError, match="was added later"):
        wrapped(input_ids=tokens())


@on_ranks(2)
@names
def test_a_model_in_one_flat_parameter_is_saved(name, tmp_path):
    """`save_pretrained` with the wrapper's state dict is complete, and without it still refused by name."""
    model, _ = built(name)
    expected = copy.deepcopy(model)
    wrapped = FSDP(model)
    state = wrapped.state_dict()
    if dist.get_rank() == 0:
        with pytest.raises(ParameterShardedError, match=r"state_dict=\.\.\."):
            wrapped.save_pretrained(tmp_path)
        wrapped.save_pretrained(tmp_path, state_dict=state)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
        assert_same_state(loaded, {name: value.cpu() for name, value in expected.state_dict().items()})
        assert not dict(model.named_parameters())


@on_ranks(2)
@pytest.mark.parametrize("nested", [False, True])
def test_adapters_are_saved(nested, tmp_path):
    """peft writes the whole adapter from the wrapper's state dict, of one flat unit and of nested ones."""
    peft = pytest.importorskip("peft")
    from safetensors.torch import load_file

    model, block = built("llama")
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    expected = {name.replace(".default", ""): p.detach() for name, p in model.named_parameters() if p.requires_grad}
    wrapped = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({block}) if nested else None)
    state = wrapped.state_dict()
    if dist.get_rank() == 0:
        wrapped.save_pretrained(tmp_path, state_dict=state)
        assert_same_state(load_file(tmp_path / "adapter_model.safetensors"), {n: p.cpu() for n, p in expected.items()})


@pytest.mark.parametrize("name", [in_full(name) if name == "llama" else name for name in MODELS])
def test_what_is_consolidated_is_loaded_by_from_pretrained(name, tmp_path):
    """Hugging Face loads what ``fairshard consolidate`` writes: logits and text equal those of the sharded model."""
    sharded = run_ranks(2, _train_and_save, name, str(tmp_path))
    command = [sys.executable, "-m", "fairshard.cli.main", "consolidate", str(tmp_path / "step"), str(tmp_path / "out")]
    options = ["--format", "safetensors", "--config", str(tmp_path / "config")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([*command, *options], check=True, capture_output=True, env=environment)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.device("cpu"), torch.no_grad():
        prompt = tokens("prompt").cpu()
        logits = model(input_ids=prompt).logits
        text = model.generate(input_ids=prompt, max_new_tokens=6, do_sample=False)
    for own_logits, own_text in sharded:
        torch.testing.assert_close(own_logits, logits, rtol=1e-5, atol=1e-6)
        assert own_text.tolist() == text.tolist()

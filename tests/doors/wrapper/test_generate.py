"""Hugging Face's ``generate`` works on a sharded model, even if ranks stop at different lengths."""

import copy

import pytest
import torch
import torch.distributed as dist

from fairshard.errors import ParameterShardedError
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn import register_forward_method
from tests.kit import rank_device
from tests.on_ranks import on_ranks

pytestmark = pytest.mark.behaviour("generate")

transformers = pytest.importorskip("transformers")

TOKENS = {"vocab_size": 32, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


def language_model(kind):
    """A small random language model of two blocks, and the list that holds the blocks."""
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(n_positions=64, n_embd=16, n_layer=2, n_head=2, **TOKENS)
        model = transformers.GPT2LMHeadModel(config)
        return model.to(rank_device()).eval(), model.transformer.h
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(max_position_embeddings=64, num_key_value_heads=1, **shape, **TOKENS)
    model = transformers.LlamaForCausalLM(config)
    return model.to(rank_device()).eval(), model.model.layers


def prompt_of(rank, length):
    """Two sequences of tokens that depend on the rank."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(3, 32, (2, length), generator=generator, device="cpu").to(rank_device())


@on_ranks(2, timeout=180.0)  # the first import of transformers takes a while
@pytest.mark.parametrize(("kind", "num_units"), [("gpt2", 0), ("gpt2", 2), ("llama", 2)])
def test_greedy_text_is_that_of_the_plain_model(kind, num_units):
    """Ranks generate as the plain model does, each a different number of tokens, then train, then generate again.

    ``generate`` looks up a parameter of the model. If one unit has flattened all parameters, there is none outside the
    forward, so ``generate`` raises an error until it is registered.
    """
    model, blocks = language_model(kind)
    plain = copy.deepcopy(model)
    for index in range(num_units):
        blocks[index] = FSDP(blocks[index])
    wrapped = FSDP(model)
    rank = dist.get_rank()
    prompt = prompt_of(rank, 3 + rank)
    new = {"max_new_tokens": 4 + 5 * rank, "do_sample": False}
    if not num_units:
        with pytest.raises(ParameterShardedError, match=r"`generate` of .*GPT2LM.*register_forward_method"):
            wrapped.generate(prompt, **new)
    register_forward_method(wrapped, "generate")
    for _ in range(2):
        texts = [plain.generate(prompt, **new), wrapped.generate(prompt, **new, synced_gpus=True)]
        assert torch.equal(*texts)
        losses = [m(input_ids=prompt, labels=prompt).loss for m in (plain, wrapped)]
        assert torch.equal(*losses)
        losses[1].backward()
        assert all(param.grad is not None for param in wrapped.parameters())
        wrapped.zero_grad()


@on_ranks(2, timeout=180.0)
def test_greedy_text_inside_summon_is_that_of_the_plain_model():
    """``Seq2SeqTrainer`` generates inside ``summon_full_params``, where ranks need not generate equally long texts."""
    model, blocks = language_model("gpt2")
    plain = copy.deepcopy(model)
    for index in range(2):
        blocks[index] = FSDP(blocks[index], use_orig_params=True)
    wrapped = FSDP(model, use_orig_params=True)
    register_forward_method(wrapped, "generate")
    rank = dist.get_rank()
    prompt = prompt_of(rank, 3)
    new = {"max_new_tokens": 2 + 5 * rank, "do_sample": False}
    for _ in range(2):
        with FSDP.summon_full_params(wrapped):
            assert torch.equal(wrapped.generate(prompt, **new), plain.generate(prompt, **new))
        losses = [m(input_ids=prompt, labels=prompt).loss for m in (plain, wrapped)]
        assert torch.equal(*losses)
        losses[1].backward()

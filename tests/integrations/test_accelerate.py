"""`fairshard.integrations.accelerate`: what `enable` changes, what `disable` undoes, and optimizers made too early."""

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.checkpoint.compared import assert_same
from tests.clients.accelerate_runs import engine_chosen, shared_folder
from tests.clients.case import be_torchrun, engine_of
from tests.clients.loops import net, next_token_loss, tokens
from tests.clients.trainer_runs import _trainer
from tests.on_ranks import in_full, on_ranks
from tests.reference import assert_same_state

pytest.importorskip("accelerate")
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

from fairshard.integrations import accelerate as integration
from fairshard.nn import FSDPModule, FullyShardedDataParallel
from fairshard.nn.data_parallel.in_place.module import sharded_class
from fairshard.nn.wrap import ModuleWrapPolicy

pytestmark = pytest.mark.cpu_only("the Accelerator is told to use the CPU")


def accelerator(version=1, backend=None, **plugin_options):
    """A new Accelerator with an FSDP plugin, on this rank of several CPU ranks; ``backend`` of torch.compile."""
    be_torchrun(dist.get_rank(), dist.get_world_size(), 29500)
    AcceleratorState._reset_state(True)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, **plugin_options)
    return Accelerator(cpu=True, fsdp_plugin=plugin, dynamo_backend=backend)


def test_disable_leaves_accelerate_as_it_was():
    """After `disable`, also after `enable` twice, the methods are accelerate's own."""
    before = AcceleratorState.__init__, Accelerator.prepare, FullyShardedDataParallelPlugin.__post_init__
    integration.enable()
    integration.enable()
    assert Accelerator.prepare is not before[1]
    integration.disable()
    assert (AcceleratorState.__init__, Accelerator.prepare, FullyShardedDataParallelPlugin.__post_init__) == before
    with integration.enabled():
        assert Accelerator.prepare is not before[1]
    assert Accelerator.prepare is before[1]
    assert "_get_name" not in vars(FSDPModule)


def test_names_that_classes_give_their_modules_are_kept():
    """While `enable` is on, a class that chooses the name shown for its modules keeps it when it is sharded."""

    class Named(nn.Module):
        def _get_name(self):
            return "its own name"

    with integration.enabled():
        assert nn.Module.__new__(sharded_class(Named))._get_name() == "its own name"


def test_optimizers_are_loaded_by_keyword():
    """The replaced `load_fsdp_optimizer` takes accelerate's arguments by position and by name."""
    seen = {}

    def original(fsdp_plugin, accelerator, optimizer, model, input_dir, optimizer_index=0, adapter_only=False):
        seen.update(locals())

    plugin = mock.Mock(**{"state_dict_type.name": "FULL_STATE_DICT"})
    load = integration._load_optimizer(original)
    load(plugin, None, None, nn.Linear(1, 1), input_dir="folder", optimizer_index=1)
    assert (seen["input_dir"], seen["optimizer_index"]) == ("folder", 1)
    load(plugin, None, None, nn.Linear(1, 1), "folder", 2, True)
    assert (seen["optimizer_index"], seen["adapter_only"]) == (2, True)


@on_ranks(2, timeout=180.0)
@pytest.mark.parametrize("version", [1, 2])
def test_without_enable_cpu_ranks_are_not_sharded(version):
    """Whether a plugin shards on CPU ranks is decided by `enable`, before and after the block."""
    with mock.patch.dict(os.environ):
        assert accelerator(version).distributed_type is DistributedType.MULTI_CPU
        with integration.enabled():
            made = accelerator(version, **({"use_orig_params": True} if version == 1 else {}))
            assert made.distributed_type is DistributedType.FSDP
            model = net()
            model, _ = made.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            assert engine_of(model) == "fairshard"
        assert accelerator(version).distributed_type is DistributedType.MULTI_CPU
        AcceleratorState._reset_state(True)


@on_ranks(2, timeout=180.0)
def test_an_optimizer_made_before_wrapping_trains_the_shards():
    """Version 1: in any order of arguments, with two groups, the optimizer holds the wrapper's parameters and steps."""
    with mock.patch.dict(os.environ), integration.enabled():
        made = accelerator(auto_wrap_policy="transformer_based_wrap", use_orig_params=True)
        model = net()
        groups = [{"params": model.embed.parameters()}, {"params": [*model.blocks.parameters()], "lr": 0.5}]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        optimizer, model = made.prepare(optimizer, model)
        own = dict(model.named_parameters())
        held = [param for group in optimizer.param_groups for param in group["params"]]
        assert {id(param) for param in held} == {id(own[name]) for name in own if "head" not in name}
        before = {name: param.detach().clone() for name, param in own.items()}
        given = tokens(dist.get_rank())
        made.backward(next_token_loss(model(given), given))
        optimizer.step()
        moved = {name for name, param in own.items() if not torch.equal(param, before[name])}
        assert moved == {name for name, param in own.items() if "head" not in name and param.numel()}
        AcceleratorState._reset_state(True)


@on_ranks(2)
def test_an_optimizer_made_before_wrapping_needs_original_parameters():
    """Version 1 without `use_orig_params`: a flat parameter cannot replace originals, and the error names the cure."""
    with mock.patch.dict(os.environ), integration.enabled():
        made = accelerator(use_orig_params=False)
        model = net()
        with pytest.raises(ValueError, match=r"`use_orig_params=True`.*or make the optimizer after `prepare\(model\)`"):
            made.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model = made.prepare(model)
        optimizer = made.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        assert engine_of(model) == "fairshard"
        assert optimizer.param_groups[0]["params"] == list(model.parameters())
        AcceleratorState._reset_state(True)


@on_ranks(1)
def test_low_precision_parameters_are_upcast_under_mixed_precision():
    """Version 1 with a bf16 policy keeps fp32 shards of trained bf16 parameters; frozen ones stay bf16."""
    from torch.distributed.fsdp import MixedPrecision

    model = net().bfloat16()
    model.embed.requires_grad_(False)
    policy = MixedPrecision(param_dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match=r"were cast, the first is `blocks\.0\.norm\.weight`"):
        wrapped = integration.AcceleratedFSDP(model, mixed_precision=policy, use_orig_params=True)
    dtypes = {name: param.dtype for name, param in wrapped.named_parameters()}
    assert dtypes.pop("embed.weight") is torch.bfloat16
    assert set(dtypes.values()) == {torch.float32}
    assert isinstance(wrapped, FullyShardedDataParallel)


@on_ranks(2, timeout=180.0)
@pytest.mark.parametrize("version", [1, 2])
def test_activation_checkpointing_changes_no_bit(version):
    """The plugin's `activation_checkpointing` wraps sharded blocks, or blocks to be sharded; losses stay the same."""
    losses = []
    for checkpointing in (False, True):
        with mock.patch.dict(os.environ), integration.enabled():
            options = {"use_orig_params": True} if version == 1 else {}
            made = accelerator(
                version,
                auto_wrap_policy="transformer_based_wrap",
                activation_checkpointing=checkpointing,
                **options,
            )
            model = net()
            model, optimizer = made.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for step in range(2):
                given = tokens(step, dist.get_rank())
                losses.append(next_token_loss(model(given), given))
                made.backward(losses[-1])
                optimizer.step()
                optimizer.zero_grad()
            wrapped = [name for name, _ in model.named_modules() if name.endswith("_checkpoint_wrapped_module")]
            assert len(wrapped) == (2 if checkpointing else 0)
            AcceleratorState._reset_state(True)
    torch.testing.assert_close(losses[2:], losses[:2], rtol=0, atol=0)


@on_ranks(2, timeout=180.0)
def test_weights_of_the_first_rank_are_loaded_on_all():
    """Version 2 with `cpu_ram_efficient_loading`: sharded on the meta device, then filled with rank 0's weights."""
    with mock.patch.dict(os.environ), integration.enabled():
        made = accelerator(2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=True)
        model = net(seed=1 + dist.get_rank())
        model, _ = made.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        expected = net(seed=1).state_dict()
        for name, param in model.named_parameters():
            torch.testing.assert_close(param.full_tensor(), expected[name], rtol=0, atol=0)
        AcceleratorState._reset_state(True)


@on_ranks(2, timeout=180.0)
def test_names_of_modules_are_those_of_parameters():
    """The Trainer exempts parameters from weight decay, and peft finds adapters, by the names of modules."""
    model = net()
    expected = [name for name, _ in model.named_parameters()]
    model = integration.AcceleratedFSDP(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=True)
    by_module = [
        f"{path}.{name}".removeprefix(".")
        for path, module in model.named_modules()
        for name, param in module._parameters.items()
        if param is not None
    ]
    assert sorted(set(by_module)) == sorted(expected) == sorted(name for name, _ in model.named_parameters())
    paths = list(paths_of(model))  # as the Trainer builds them
    assert any("module." in path for path in paths)
    assert sorted(integration._without_wrappers(model, path) for path in paths) == sorted(expected)


def paths_of(module):
    for name, child in module.named_children():
        yield from (f"{name}.{path}" for path in paths_of(child))
    yield from (name for name, param in module._parameters.items() if param is not None)


@on_ranks(2, timeout=180.0)
@pytest.mark.parametrize("state", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_a_new_optimizer_resumes_with_the_state_that_was_saved(state):
    """Version 1: a second run that loads what a first has saved before, or after, a step has its optimizer's state."""
    folder = shared_folder()
    for steps in (0, 1):
        with mock.patch.dict(os.environ), integration.enabled():
            expected, first = first_run(state, steps, f"{folder}/{steps}")
            made, model, optimizer = prepared(state)
            made.load_state(f"{folder}/{steps}")
            found = FullyShardedDataParallel.full_optim_state_dict(model, optimizer, rank0_only=False)
            assert bool(expected["state"]) == bool(steps)
            assert_same((model.state_dict(), found), (first, expected))
            AcceleratorState._reset_state(True)


def prepared(state):
    """An accelerator with a new model and AdamW."""
    options = {"auto_wrap_policy": "transformer_based_wrap", "use_orig_params": True, "state_dict_type": state}
    made = accelerator(**options)
    model = net()
    return made, *made.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))


def first_run(state, steps, folder):
    """Train and save; the whole state of optimizer and model."""
    made, model, optimizer = prepared(state)
    for step in range(steps):
        given = tokens(step, dist.get_rank())
        made.backward(next_token_loss(model(given), given))
        optimizer.step()
    made.save_state(folder)
    return FullyShardedDataParallel.full_optim_state_dict(model, optimizer, rank0_only=False), model.state_dict()


@on_ranks(2, timeout=180.0)
@pytest.mark.parametrize("state", ["FULL_STATE_DICT", in_full("SHARDED_STATE_DICT")])
def test_the_trainer_saves_and_resumes_adapters(state):
    """Version 1 with LoRA: the file has the model's values, and a second Trainer continues like an unbroken run."""
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    from safetensors.torch import load_file

    with mock.patch.dict(os.environ):
        be_torchrun(dist.get_rank(), dist.get_world_size(), 29500)
        with engine_chosen("fairshard"):
            folder = shared_folder()
            first, resumed = (_trainer(folder, 1, state, True, "no", False) for _ in range(2))
            first.train()
            resumed.train(resume_from_checkpoint=os.path.join(folder, "checkpoint-2"))
            whole = first.model.state_dict()
            assert_same_state(resumed.model.state_dict(), whole)
            adapter = {name.replace(".default", ""): value for name, value in whole.items() if "lora_" in name}
            assert len(adapter) == 8  # A and B of two projections in two layers
            if state == "FULL_STATE_DICT" and dist.get_rank() == 0:
                assert_same_state(load_file(os.path.join(folder, "checkpoint-4", "adapter_model.safetensors")), adapter)
            dist.barrier()


@on_ranks(2, timeout=180.0)
def test_a_compiled_wrapper_is_saved_as_an_uncompiled_one():
    """Version 1: unwrapping leaves it whole, states have plain names, and a checkpoint loads without torch.compile."""
    states = []
    folder = shared_folder()
    for backend in ("eager", "no"):
        with mock.patch.dict(os.environ), integration.enabled():
            options = {"auto_wrap_policy": "transformer_based_wrap", "use_orig_params": True}
            made = accelerator(backend=backend, state_dict_type="FULL_STATE_DICT", **options)
            plain = net(seed=len(states))
            model, optimizer = made.prepare(plain, torch.optim.AdamW(plain.parameters(), lr=0.1))
            if backend == "eager":
                given = tokens(dist.get_rank())
                assert made.unwrap_model(model) is plain
                made.backward(next_token_loss(model(given), given))
                optimizer.step()
                made.save_state(folder)
            else:
                made.load_state(folder)
            states.append((made.get_state_dict(model), optimizer.optimizer.state_dict()))
            AcceleratorState._reset_state(True)
    assert set(states[0][0]) == (set() if dist.get_rank() else set(net().state_dict()))
    assert_same(*states)


@on_ranks(2, timeout=180.0)
def test_the_trainer_trains_after_evaluating():
    """Version 1: evaluating first changes nothing in the training."""
    pytest.importorskip("transformers")
    with mock.patch.dict(os.environ):
        be_torchrun(dist.get_rank(), dist.get_world_size(), 29500)
        with engine_chosen("fairshard"):
            trained = []
            for evaluates in (False, True):
                trainer = _trainer(shared_folder(), 1, "FULL_STATE_DICT", False, "no", False)
                trainer.args.max_steps = 1
                if evaluates:
                    trainer.evaluate(trainer.train_dataset)
                trainer.train()
                trained.append(trainer.model.state_dict())
    assert_same_state(*trained)


@on_ranks(2, timeout=180.0)
def test_the_trainer_shifts_labels_of_a_sharded_model():
    """Version 2: the loss with label smoothing is the plain model's; the Trainer knows by its name to shift labels."""
    pytest.importorskip("transformers")
    from transformers.trainer_pt_utils import LabelSmoother

    from tests.clients.trainer_runs import llama

    with mock.patch.dict(os.environ):
        be_torchrun(dist.get_rank(), dist.get_world_size(), 29500)
        with engine_chosen("fairshard"):
            trainer = _trainer(shared_folder(), 2, "FULL_STATE_DICT", False, "no", False)
            smooth = trainer.label_smoother = LabelSmoother(epsilon=0.1)
            model, _ = trainer.accelerator.prepare(trainer.model, torch.optim.SGD(trainer.model.parameters()))
            row = {name: ids.unsqueeze(0) for name, ids in trainer.train_dataset[0].items()}
            assert trainer.label_names == ["labels"]
            loss = trainer.compute_loss(model, dict(row))
    expected = smooth(llama()(**row), row["labels"], shift_labels=True)
    torch.testing.assert_close(loss, expected, rtol=0, atol=0)
    assert model._get_name() == "FSDPLlamaForCausalLM"

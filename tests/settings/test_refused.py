"""Arguments of a wrapper that are refused before anything is sent, in one table."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecision as TorchMixedPrecision

from fairshard.nn import CPUOffload, MixedPrecision, ShardingStrategy
from fairshard.nn import FullyShardedDataParallel as FSDP
from tests.doors.mistakes import check, layer, two
from tests.kit import CollectiveCounter, fake_group

BF16 = torch.bfloat16
LOW = MixedPrecision(BF16, keep_low_precision_grads=True)


# By name: the kind of error, the parts of its message, and the arguments after the module. A callable makes them.
ARGUMENTS = {
    "a flag that is none": (TypeError, ["`verbose` must be True or False, but is 1"], {"verbose": 1}),
    "a device elsewhere": (ValueError, ["must be the CPU or the module"], {"state_dict_device": "meta"}),
    "no device": (RuntimeError, ["disk"], {"state_dict_device": "disk"}),
    "no bool": (TypeError, ["`move_params_to_cpu` must be True, False or None"], {"move_params_to_cpu": "yes"}),
    "offload and none": (
        ValueError,
        ["contradicts `cpu_offload=True`"],
        {"cpu_offload": True, "move_params_to_cpu": False},
    ),
    "precision and dtype": (
        ValueError,
        ["MixedPrecision object must hold all", "`compute_dtype`"],
        {"mixed_precision": MixedPrecision(BF16), "compute_dtype": BF16},
    ),
    "torch's precision and dtype": (
        ValueError,
        ["MixedPrecision object must hold all", "`compute_dtype`"],
        {"mixed_precision": TorchMixedPrecision(BF16), "compute_dtype": BF16},
    ),
    "precision and fp32": (
        ValueError,
        ["MixedPrecision object must hold all", "`fp32_reduce_scatter`"],
        {"mixed_precision": MixedPrecision(BF16), "fp32_reduce_scatter": True},
    ),
    "precision and buffers": (
        ValueError,
        ["MixedPrecision object must hold all", "`buffer_dtype`"],
        {"mixed_precision": MixedPrecision(BF16), "buffer_dtype": BF16},
    ),
    "low precision on the host": (
        ValueError,
        ["`keep_low_precision_grads=True` cannot be combined with `cpu_offload`"],
        {"mixed_precision": LOW, "cpu_offload": True},
    ),
    "low precision moved": (
        ValueError,
        ["`keep_low_precision_grads=True` cannot be combined with", "`move_grads_to_cpu`"],
        {"mixed_precision": LOW, "move_grads_to_cpu": True},
    ),
    "keeps and frees": (
        ValueError,
        ["`reshard_after_forward=False` contradicts `sharding_strategy=FULL_SHARD`"],
        {"reshard_after_forward": False, "sharding_strategy": ShardingStrategy.FULL_SHARD},
    ),
    "keeps twice": (
        ValueError,
        ["keeps parameters after the forward"],
        {"reshard_after_forward": False, "sharding_strategy": ShardingStrategy.NO_SHARD},
    ),
    "a strategy by position": (
        TypeError,
        ["pass those of PyTorch's FSDP by keyword"],
        {"reshard_after_forward": ShardingStrategy.FULL_SHARD},
    ),
    "an offload by position": (
        TypeError,
        ["`mixed_precision` must be True, False or a MixedPrecision"],
        {"mixed_precision": CPUOffload(True)},
    ),
    "two groups": (
        ValueError,
        ["must be one group for FULL_SHARD"],
        lambda: {"process_group": (dist.group.WORLD, dist.group.WORLD)},
    ),
    "a group for a pair": (
        ValueError,
        ["must be a pair for HYBRID_SHARD"],
        lambda: {"process_group": dist.group.WORLD, "sharding_strategy": ShardingStrategy.HYBRID_SHARD},
    ),
    "one group twice": (
        ValueError,
        ["in common and no other, but have"],
        lambda: {"process_group": (dist.group.WORLD,) * 2, "sharding_strategy": ShardingStrategy.HYBRID_SHARD},
    ),
    "a mesh of one dimension": (
        ValueError,
        ["`device_mesh` must have 2 dimensions"],
        lambda: {"device_mesh": init_device_mesh("cpu", (2,)), "sharding_strategy": ShardingStrategy.HYBRID_SHARD},
    ),
    "a group and a mesh": (
        ValueError,
        ["must not both be given"],
        lambda: {"process_group": dist.group.WORLD, "device_mesh": init_device_mesh("cpu", (2,))},
    ),
    "a number for an init": (ValueError, ["`param_init_fn` must be a function"], {"param_init_fn": 7}),
    "a name for an init": (ValueError, ["`param_init_fn` must be a function"], {"param_init_fn": "xavier"}),
    "a number for a flag": (
        TypeError,
        ["`sync_module_states` must be True or False"],
        {"sync_module_states": 1},
    ),
    **{
        f"device {value}": (TypeError, ["`device_id` must be the number of an accelerator"], {"device_id": value})
        for value in (True, 1.0, [0])
    },
    **{
        f"{name} {given}": (TypeError, [f"`{name}` must be an iterable of nn."], {name: given})
        for name in ("ignored_modules", "ignored_states", "ignored_parameters")
        for given in (3, [3], "ab", layer())
    },
    "a module as parameter": (TypeError, ["object of type Linear"], {"ignored_parameters": [layer()]}),
    "a parameter as module": (TypeError, ["object of type Parameter"], {"ignored_modules": [layer().weight]}),
    "states and modules": (
        ValueError,
        ["`ignored_states` cannot be combined with"],
        {"ignored_states": [layer()], "ignored_modules": [layer()]},
    ),
}
FIELDS = {
    "param_dtype": ["bf16", torch.int64],
    "reduce_dtype": [16],
    "buffer_dtype": [torch.int8],
    "keep_low_precision_grads": [1],
    "cast_forward_inputs": [None],
    "cast_root_forward_inputs": ["yes"],
    "_module_classes_to_ignore": [nn.Linear, (layer(),)],
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_are_refused(name):
    """The error names the argument; nothing has been sent, and the module is as it was."""
    kind, says, given = ARGUMENTS[name]
    module = two()
    with fake_group(2):
        arguments = given() if callable(given) else given
        with CollectiveCounter() as counter:
            check((kind, says, lambda: FSDP(module, **arguments)))
    assert not counter.calls
    assert list(module.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]


@pytest.mark.parametrize("cls", [MixedPrecision, TorchMixedPrecision])
@pytest.mark.parametrize(("name", "value"), [(name, value) for name in FIELDS for value in FIELDS[name]], ids=str)
def test_fields_of_precision_are_refused(cls, name, value):
    """Wrong types and dtypes raise, in our object and in PyTorch's, and name the field."""
    with fake_group(2), pytest.raises((TypeError, ValueError), match=f"`{name}` must be"):
        FSDP(layer(), mixed_precision=cls(**{name: value}))

"""``fairshard plan``: units, buckets and memory of a model before it is built, without a process group."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fairshard.cli.checkpoints import size_argument
from fairshard.cli.model import planned_task, policy_of
from fairshard.cli.options import COMPUTE_DTYPES, OptionError, TrainOptions, add_flags, refused
from fairshard.extras.planning.describe import describe
from fairshard.extras.planning.peak import OPTIMIZERS
from fairshard.nn import Owned, RowBlocks, ShardingStrategy

_SETTINGS = ("reshard_after_forward", "cpu_offload", "move_grads_to_cpu", "bucket_cap_mb")
_SHARED = (
    *("device", "hf", "factory", "layers", "dim", "heads", "context", "vocab_size", "policy", "precision"),
    *_SETTINGS,
)
_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
_MAX_RANKS = 10**5
_LEAST_MEMORY = 10**6


def add_plan_command(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command, which sets ``run``."""
    parser = commands.add_parser(
        "plan",
        help="show the units, buckets and memory of a wrapping policy",
        description="Build a model without memory (on torch's meta device), plan its wrapping, and show units, "
        "buckets, and the predicted peak of a training step term by term. Activations are not counted. Without "
        "--policy there is one unit.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", choices=["gpt"], help="the model of fairshard train (the default)")
    parser.add_argument("--world-size", type=int, required=True, metavar="N", help="ranks to shard over")
    parser.add_argument("--sharding-strategy", choices=_STRATEGIES, help="(default: FULL_SHARD)")
    parser.add_argument("--replicas", type=int, metavar="N", help="replicas of the shards, with a hybrid strategy")
    parser.add_argument("--reshard-to", type=int, metavar="N", help="keep units sharded over N ranks after a forward")
    parser.add_argument(
        "--placement", default="flat", metavar="KIND", help="where ranks' cuts may fall: flat: anywhere; "
        "row-blocks[:N]: between blocks of N rows; owned: between parameters (default: flat)",
    )  # fmt: skip
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), default="adamw", help="(default: %(default)s)")
    parser.add_argument(
        "--device-memory", type=size_argument, metavar="SIZE", help="memory of a device: say whether the peak fits"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_flags(parser, *_SHARED)
    parser.set_defaults(run=_plan)


def _plan(arguments: argparse.Namespace) -> int:
    shared = {name: value for name, value in vars(arguments).items() if name in _SHARED}
    options = TrainOptions.of({"policy": "none", "optimizer": "cpu-adamw", **shared})
    limit, dtype = arguments.device_memory, COMPUTE_DTYPES.get(options.precision)
    if not 1 <= arguments.world_size <= _MAX_RANKS:
        raise OptionError(f"--world-size must be 1 to {_MAX_RANKS:,}, but is {arguments.world_size}.")
    if limit is not None and limit < _LEAST_MEMORY:
        raise OptionError(f"--device-memory must be 1 MB or more, but is {limit} B. Write 80GB.")
    if arguments.reshard_to is not None and not options.reshard_after_forward:
        raise OptionError("--reshard-to cannot be combined with --no-reshard-after-forward. Remove one of them.")
    if arguments.model is not None and (options.hf or options.factory) is not None:
        raise OptionError("--model is not allowed with --hf or --factory. Leave one of them out.")
    settings = {name: getattr(options, name) for name in _SETTINGS}
    settings["reshard_after_forward"] = arguments.reshard_to or options.reshard_after_forward
    if arguments.sharding_strategy is not None:
        settings["sharding_strategy"] = ShardingStrategy[arguments.sharding_strategy]
    placement, model = _placement(arguments.placement), _model(options)
    with refused("", TypeError, ValueError):
        plan = describe(
            model,
            policy_of(options.policy, model),
            arguments.world_size,
            optimizer=arguments.optimizer,
            device=None if options.device == "auto" else options.device,
            placement_fn=placement,
            num_replicas=arguments.replicas,
            mixed_precision=dtype is not None,
            compute_dtype=dtype,
            **settings,
        )
    if arguments.json:
        fits = {} if limit is None else {"device_nbytes": limit, "fits": plan.peak_nbytes <= limit}
        print(json.dumps({**plan.as_dict(), **fits}, indent=1))
        return 0
    print(plan)
    if limit is not None:
        print(f"\n{plan.verdict(limit)}")
    return 0


def _model(options: TrainOptions) -> nn.Module:
    """The model, on the meta device."""
    if options.hf is None:
        task = planned_task(options)
        assert task is not None
        return task.model
    from fairshard.cli.hugging_face import random_model, read_config

    config = read_config(options.hf)  # of any kind of model
    with refused(f"--hf {options.hf} cannot be built: ", Exception), torch.device("meta"):
        return random_model(config)


def _placement(text: str) -> Callable[[Any], Any] | None:
    """The function of a parameter that ``--placement`` describes; None for the default."""
    kind, colon, rows = text.partition(":")
    if text == "flat":
        return None
    if text == "owned":
        return lambda param: Owned()
    if kind != "row-blocks" or (colon and not rows.isdecimal()) or rows == "0":
        raise OptionError(f"--placement must be flat, owned or row-blocks[:N], with N at least 1, but is {text}.")
    placed = RowBlocks(int(rows or 1))
    return lambda param: placed

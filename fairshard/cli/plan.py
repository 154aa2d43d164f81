"""``fairshard plan``: units, buckets and memory of a model before it is built, without a process group."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fairshard.cli.local_path import local_path
from fairshard.cli.options import COMPUTE_DTYPES, PRECISIONS, OptionError, TrainOptions

_GPT_FLAGS = ("layers", "dim", "heads", "context")
_OPTIMIZERS = ("adamw", "adam", "sgd", "sgd-momentum")
_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
_MAX_RANKS, _MAX_BUCKET_MB = 10**5, 10**6
_DEVICE = "type of the device that computes: cpu, cuda, xpu, ... (default: this host's)"
_RESHARD = "free a unit's full weights between forward and backward (default: yes)"


def add_plan_command(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command, which sets ``run``."""
    parser = commands.add_parser(
        "plan",
        help="show the units, buckets and memory of a wrapping policy",
        description="Build a model without memory (on torch's meta device), plan its wrapping, and show units,\n"
        "buckets, and the predicted peak of a training step term by term. Activations are not counted.",
        epilog="  fairshard plan --layers 24 --dim 2048 --policy class:Block --world-size 8 --precision bf16\n"
        "  fairshard plan --hf configs/llama --policy class:LlamaDecoderLayer --world-size 8 --json\n"
        "  fairshard plan --factory mypackage.models:build --policy size:1e7 --world-size 4",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    model = parser.add_argument_group("model")
    which = model.add_mutually_exclusive_group()
    which.add_argument("--model", choices=["gpt"], help="the model of fairshard train (the default)")
    which.add_argument("--hf", type=local_path, metavar="CONFIG_DIR", help="a Hugging Face folder with a config.json")
    which.add_argument("--factory", metavar="PKG.MOD:FN", help="function without arguments that returns the model")
    for flag in _GPT_FLAGS:
        default = getattr(TrainOptions, flag)
        model.add_argument(f"--{flag}", type=int, metavar="N", help=f"{flag} of the gpt (default: {default})")
    wrapping = parser.add_argument_group("wrapping")
    wrapping.add_argument(
        "--policy",
        default="none",
        metavar="POLICY",
        help="size:N: units of at least N parameters; class:NAME[,NAME]: instances of these classes; none: one unit "
        "(default: %(default)s)",
    )
    wrapping.add_argument("--world-size", type=int, required=True, metavar="N", help="ranks to shard over")
    wrapping.add_argument("--sharding-strategy", choices=_STRATEGIES, help="(default: FULL_SHARD)")
    wrapping.add_argument("--replicas", type=int, metavar="N", help="replicas of the shards, with a hybrid strategy")
    wrapping.add_argument("--precision", choices=PRECISIONS, default="fp32", help="compute in (default: %(default)s)")
    wrapping.add_argument(
        "--bucket-cap-mb", type=float, default=TrainOptions.bucket_cap_mb, metavar="X", help="size of a bucket"
    )
    wrapping.add_argument(
        "--placement",
        default="flat",
        metavar="KIND",
        help="where ranks' cuts may fall: flat: anywhere; row-blocks[:N]: between blocks of N rows; owned: between "
        "parameters (default: flat)",
    )
    reshard = argparse.BooleanOptionalAction
    wrapping.add_argument("--reshard-after-forward", action=reshard, default=True, help=_RESHARD)
    wrapping.add_argument("--reshard-to", type=int, metavar="N", help="keep them sharded over N ranks instead")
    wrapping.add_argument("--cpu-offload", action="store_true", help="keep the weights' shards in host memory")
    wrapping.add_argument("--move-grads-to-cpu", action=reshard, help="their gradients too (default: as --cpu-offload)")
    wrapping.add_argument("--optimizer", choices=_OPTIMIZERS, default="adamw", help="(default: %(default)s)")
    wrapping.add_argument("--device", default="auto", metavar="TYPE", help=_DEVICE)
    parser.add_argument("--schedule", action="store_true", help="also print the communication of a backward, in order")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_plan)


def _plan(arguments: argparse.Namespace) -> int:
    if arguments.world_size < 1:
        raise OptionError(f"--world-size must be at least 1, but is {arguments.world_size}.")
    if arguments.world_size > _MAX_RANKS:
        raise OptionError(f"--world-size must be at most {_MAX_RANKS:,}, but is {arguments.world_size}.")
    if not 0 <= arguments.bucket_cap_mb <= _MAX_BUCKET_MB:
        raise OptionError(f"--bucket-cap-mb must be 0 to {_MAX_BUCKET_MB:,}, but is {arguments.bucket_cap_mb}.")
    if arguments.reshard_to is not None and not arguments.reshard_after_forward:
        raise OptionError("--reshard-to cannot be combined with --no-reshard-after-forward. Remove one of them.")
    size = _size_in(arguments.policy)
    placement = _placement(arguments.placement)
    build = _builder(arguments)
    from fairshard.nn import ShardingStrategy
    from fairshard.nn.wrap import describe

    try:
        with torch.device("meta"):
            model = build()
    except (Exception, SystemExit) as error:  # user code may raise anything
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise OptionError(f"the model cannot be built on the meta device: {what}") from error
    if not isinstance(model, nn.Module):
        raise OptionError(f"--factory {arguments.factory} must return a module, but returned {type(model).__name__}.")
    dtype = COMPUTE_DTYPES.get(arguments.precision)
    strategy = arguments.sharding_strategy
    reshard = arguments.reshard_after_forward
    try:
        plan = describe(
            model,
            _policy(arguments.policy, size, model),
            arguments.world_size,
            optimizer=arguments.optimizer,
            device=None if arguments.device == "auto" else arguments.device,
            placement_fn=placement,
            mixed_precision=dtype is not None,
            compute_dtype=dtype,
            bucket_cap_mb=arguments.bucket_cap_mb,
            num_replicas=arguments.replicas,
            sharding_strategy=None if strategy is None else ShardingStrategy[strategy],
            reshard_after_forward=reshard if arguments.reshard_to is None else arguments.reshard_to,
            cpu_offload=arguments.cpu_offload,
            move_grads_to_cpu=arguments.move_grads_to_cpu,
        )
    except (TypeError, ValueError) as error:
        raise OptionError(" ".join(str(error).split())) from error
    print(json.dumps(plan.as_dict(), indent=1) if arguments.json else plan)
    if arguments.schedule and not arguments.json:
        print("\nbackward: where it is     > what every rank then does", *plan.schedule, sep="\n")
    return 0


def _builder(arguments: argparse.Namespace) -> Callable[[], Any]:
    """The function that builds the model, after all checks that do not need the model."""
    given = [flag for flag in _GPT_FLAGS if getattr(arguments, flag) is not None]
    if given and (arguments.hf is not None or arguments.factory is not None):
        raise OptionError(f"--{given[0]} describes the gpt, but the model is another one. Leave it out.")
    if arguments.hf is not None:
        return _hf_builder(arguments.hf)
    if arguments.factory is not None:
        return _factory(arguments.factory)
    options = TrainOptions(**{flag: getattr(arguments, flag) for flag in given})
    from fairshard.cli.gpt import GPT, GPTConfig

    return partial(GPT, GPTConfig(options.layers, options.dim, options.heads, options.context))


def _hf_builder(folder: Path) -> Callable[[], Any]:
    if not os.path.isfile(folder / "config.json"):
        raise OptionError(f"--hf must be a folder with a config.json, but {folder} has none.")
    if importlib.util.find_spec("transformers") is None:
        raise OptionError("--hf needs transformers. Run: pip install 'fairshard[hf]'")
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # a hostile config can raise anything
        raise OptionError(f"--hf {folder} cannot be read: {' '.join(str(error).split())}") from error
    is_causal = type(config) in AutoModelForCausalLM._model_mapping
    return partial((AutoModelForCausalLM if is_causal else AutoModel).from_config, config)


def _factory(text: str) -> Callable[[], Any]:
    module_name, colon, name = text.partition(":")
    if not (module_name and colon and name):
        raise OptionError(f"--factory must be PKG.MOD:FN, but is {text}.")
    sys.path.insert(0, "")  # as with `python -m`: finds the user's own modules
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (Exception, SystemExit) as error:  # a module may raise anything when it is imported
        raise OptionError(f"--factory {text} cannot be imported: {error}") from error
    finally:
        sys.path.remove("")
    if not callable(function):
        raise OptionError(f"--factory {text} must be a function, but is {type(function).__name__}.")
    made: Callable[[], Any] = function
    return made


def _size_in(policy: str) -> int | None:
    """The number in ``size:N``; None for other policies."""
    kind, _, value = policy.partition(":")
    if kind == "size":
        try:
            size = float(value)
        except ValueError:
            size = 0.0
        if not 1 <= size < float("inf"):
            raise OptionError(f"--policy size:N needs a number of parameters of at least 1, but N is {value!r}.")
        return int(size)
    if policy != "none" and not (kind == "class" and value):
        raise OptionError(f"--policy must be size:N, class:NAME or none, but is {policy}.")
    return None


def _placement(text: str) -> Callable[[Any], Any] | None:
    """The function of a parameter that ``--placement`` describes; None for the default."""
    from fairshard.nn import Owned, RowBlocks

    kind, colon, rows = text.partition(":")
    if text == "flat":
        return None
    if text == "owned":
        return lambda param: Owned()
    if kind != "row-blocks" or (colon and not rows.isdecimal()) or rows == "0":
        raise OptionError(f"--placement must be flat, owned or row-blocks[:N], with N at least 1, but is {text}.")
    placed = RowBlocks(int(rows or 1))
    return lambda param: placed


def _policy(text: str, size: int | None, model: nn.Module) -> Any:
    """The policy that ``text`` describes; class names are looked up among the modules of ``model``."""
    from fairshard.nn.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy

    if size is not None:
        return partial(size_based_auto_wrap_policy, min_num_params=size)
    if text == "none":
        return None
    classes = {type(part) for part in model.modules()}
    wanted = text.removeprefix("class:").split(",")
    missing = [name for name in wanted if name not in {cls.__name__ for cls in classes}]
    if missing:
        names = ", ".join(sorted({cls.__name__ for cls in classes}))
        raise OptionError(f"--policy class:{missing[0]} must be a class of a module of this model, which has {names}.")
    return ModuleWrapPolicy(cls for cls in classes if cls.__name__ in wanted)

"""``fairshard plan``: units, buckets and memory of a model before it is built, without a process group."""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fairshard.cli.checks import check_new
from fairshard.cli.factory import imported, parts_of
from fairshard.cli.local_path import local_path
from fairshard.cli.option_error import OptionError
from fairshard.cli.options import COMPUTE_DTYPES, PRECISIONS, TrainOptions
from fairshard.cli.plan_variants import VARIANTS, Variant, variant_lines, variants_of
from fairshard.cli.size_argument import memory_argument
from fairshard.cli.wrapping import POLICIES, check_policy, policy_of

_GPT_FLAGS = ("layers", "dim", "heads", "context", "vocab_size")
if TYPE_CHECKING:
    from fairshard.extras.planning.wrap_plan import WrapPlan

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
        "  fairshard plan --factory mypackage.models:build --policy size:1e7 --world-size 4\n"
        "  fairshard plan --hf configs/llama --world-size 8 --device-memory 80GB --compare --png plan.png",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    model = parser.add_argument_group("model")
    which = model.add_mutually_exclusive_group()
    which.add_argument("--model", choices=["gpt"], help="the model of fairshard train (the default)")
    which.add_argument("--hf", type=local_path, metavar="PATH", help="a Hugging Face config, or a folder with one")
    which.add_argument("--factory", metavar="PKG.MOD:FN", help="function without arguments that returns the model")
    for flag in _GPT_FLAGS:
        default = getattr(TrainOptions, flag)
        name = flag.replace("_", "-")
        model.add_argument(f"--{name}", type=int, metavar="N", help=f"{flag} of the gpt (default: {default})")
    wrapping = parser.add_argument_group("wrapping")
    wrapping.add_argument(
        "--policy",
        default="none",
        metavar="POLICY",
        help=f"{POLICIES} (default: %(default)s)",
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
    limit = "memory of a device, such as 80GB: say whether the peak fits"
    parser.add_argument("--device-memory", type=memory_argument, metavar="SIZE", help=limit)
    parser.add_argument("--png", type=local_path, metavar="FILE", help="draw the terms of the peak into a new file")
    parser.add_argument(
        "--compare", nargs="*", metavar="POLICY[@PLACEMENT]", help="show these wrappings side by side instead of one; "
        "without names: " + " ".join(VARIANTS),
    )  # fmt: skip
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
    check_policy("--policy", arguments.policy)
    if arguments.compare is None:
        variants = [Variant(arguments.policy, arguments.placement)]
    else:
        if arguments.schedule:
            raise OptionError("--schedule is that of one wrapping, but --compare shows several. Leave one of them out.")
        variants = variants_of(arguments.compare, arguments.policy, arguments.placement)
    placements = [_placement(variant.placement) for variant in variants]
    if arguments.png is not None:
        _check_png(arguments.png)
    model = _built(arguments)
    plans = []
    for variant, placement in zip(variants, placements, strict=True):
        plans.append(_described(arguments, model, variant, placement))
    limit = arguments.device_memory
    if arguments.png is not None:
        from fairshard.cli.plan_picture import draw_plans

        draw_plans(arguments.png, _title(arguments, model), [str(variant) for variant in variants], plans, limit)
    if arguments.compare is None:
        _show(plans[0], arguments)
    elif arguments.json:
        found = [{**asdict(v), **plan.as_dict()} for v, plan in zip(variants, plans, strict=True)]
        print(json.dumps(found, indent=1))
    else:
        print("\n".join(variant_lines(variants, plans, limit)))
    return 0


def _show(plan: WrapPlan, arguments: argparse.Namespace) -> None:
    limit = arguments.device_memory
    if arguments.json:
        fits = {} if limit is None else {"device_nbytes": limit, "fits": plan.peak_nbytes <= limit}
        print(json.dumps({**plan.as_dict(), **fits}, indent=1))
        return
    print(plan)
    if arguments.schedule:
        print("\nbackward: where it is     > what every rank then does", *plan.schedule, sep="\n")
    if limit is not None:
        print(f"\n{plan.verdict(limit)}")


def _title(arguments: argparse.Namespace, model: nn.Module) -> str:
    numel = sum(param.numel() for param in model.parameters())
    ranks = f"{arguments.world_size} rank{'s' if arguments.world_size > 1 else ''}"
    return f"{type(model).__name__}, {numel:,} parameters, {ranks}, {arguments.precision}, {arguments.optimizer}"


def _built(arguments: argparse.Namespace) -> nn.Module:
    """The model, on the meta device."""
    build = _builder(arguments)
    try:
        with torch.device("meta"):
            made = build()
    except OptionError:
        raise
    except (Exception, SystemExit) as error:  # user code may raise anything
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise OptionError(f"the model cannot be built on the meta device: {what}") from error
    return parts_of(str(arguments.factory), made)[0]


def _described(
    arguments: argparse.Namespace, model: nn.Module, variant: Variant, placement: Callable[[Any], Any] | None
) -> WrapPlan:
    from fairshard.nn import ShardingStrategy
    from fairshard.nn.wrap import describe

    dtype = COMPUTE_DTYPES.get(arguments.precision)
    strategy = arguments.sharding_strategy
    reshard = arguments.reshard_after_forward
    try:
        return describe(
            model,
            policy_of("--policy", variant.policy, model),
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


def _check_png(path: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise OptionError("--png needs matplotlib. Run: pip install 'fairshard[cli]'")
    if path.suffix.lower() != ".png":
        raise OptionError(f"--png must end in .png, but is {path}.")
    check_new(path, "--png ")


def _builder(arguments: argparse.Namespace) -> Callable[[], Any]:
    """The function that builds the model, after all checks that do not need the model."""
    given = [flag for flag in _GPT_FLAGS if getattr(arguments, flag) is not None]
    if given and (arguments.hf is not None or arguments.factory is not None):
        flag = given[0].replace("_", "-")
        raise OptionError(f"--{flag} describes the gpt, but the model is another one. Leave it out.")
    if arguments.hf is not None:
        from fairshard.cli.hugging_face import random_model, read_config

        return partial(random_model, read_config(arguments.hf))
    if arguments.factory is not None:
        return imported(arguments.factory)
    options = TrainOptions(**{flag: getattr(arguments, flag) for flag in given})
    from fairshard.cli.gpt import GPT, GPTConfig

    return partial(GPT, GPTConfig(options.layers, options.dim, options.heads, options.context, options.vocab_size))


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

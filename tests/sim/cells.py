"""Ways to use the engine on the simulated accelerator; ``training.py`` trains in each of them."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Cell:
    """How one run shards, computes and steps. ``ways`` names what it does besides: see `train`."""

    name: str
    door: str = "wrapper"  # or orig, fully_shard
    precision: str = "fp32"  # or bf16, fp16
    placement: str = "device"  # or offload, master (gradients move to the host), held
    optimizer: str = "sgd"  # or cpu, overlap
    ways: frozenset = field(default_factory=frozenset)

    def __str__(self):
        return self.name


def cell(name, *ways, **options):
    """A `Cell` whose ways are ``ways``."""
    return Cell(name, ways=frozenset(ways), **options)


BASIC = [
    cell(f"{door}-{precision}-{placement}", door=door, precision=precision, placement=placement, optimizer=optimizer)
    for door in ("wrapper", "orig", "fully_shard")
    for precision in ("fp32", "bf16")
    for placement, optimizer in (("device", "sgd"), ("offload", "sgd"))
]
CELLS = [
    *BASIC,
    cell("small-buckets", "small_buckets"),
    cell("fully_shard-medium-buckets", "medium_buckets", door="fully_shard"),
    cell("fully_shard-small-buckets", "small_buckets", door="fully_shard"),
    cell("blocks", "blocks", "clip", "whole", door="fully_shard"),
    cell("blocks-bf16-offload", "blocks", "clip_inf", door="fully_shard", precision="bf16", placement="offload"),
    cell("blocks-clip-inf", "blocks", "clip_inf", door="fully_shard"),
    cell("blocks-scaler", "blocks", "torch_scaler", door="fully_shard"),
    cell("owned", "owned", "clip", "whole", door="fully_shard"),
    cell("owned-bf16-offload", "owned", "medium_buckets", door="fully_shard", precision="bf16", placement="offload"),
    cell("owned-hybrid", "owned", "hybrid", door="fully_shard", precision="bf16"),
    cell("owned-state", "owned", "state", door="orig"),
    cell("muon", optimizer="muon"),
    cell("muon-rows", optimizer="muon", door="fully_shard"),
    cell("muon-offload", optimizer="muon", door="fully_shard", placement="offload"),
    cell("held", placement="held", precision="bf16", optimizer="cpu"),
    cell("held-overlap", placement="held", precision="bf16", optimizer="overlap"),
    cell("master", placement="master"),
    cell("cpu-optimizer", placement="offload", optimizer="cpu"),
    cell("cpu-optimizer-clip", placement="offload", optimizer="clip"),
    cell("overlap", placement="offload", optimizer="overlap"),
    cell("overlap-orig", placement="offload", optimizer="overlap", door="orig", precision="bf16"),
    cell("fully_shard-overlap", placement="offload", optimizer="overlap", door="fully_shard"),
    cell("no-shard", "no_shard", precision="bf16"),
    cell("no-shard-offload", "no_shard", placement="offload"),
    cell("hybrid", "hybrid", precision="bf16"),
    cell("fully_shard-hybrid", "hybrid", door="fully_shard"),
    cell("few", "few"),
    cell("fully_shard-few", "few", door="fully_shard", precision="bf16"),
    cell("keeps-gathered", "keeps_gathered", precision="bf16"),
    cell("writes-in-forward", "writes_in_forward"),
    cell("hook", "hook"),
    cell("hook-no-shard", "hook", "no_shard"),
    cell("join", "join"),
    cell("join-offload", "join", placement="offload", precision="bf16"),
    cell("accumulate", "accumulate", precision="bf16"),
    cell("accumulate-offload", "accumulate", placement="offload"),
    cell("no-sync", "no_sync"),
    cell("no-sync-offload", "no_sync", placement="offload", door="orig"),
    cell("clip", "clip"),
    cell("clip-offload", "clip", placement="offload", door="fully_shard"),
    cell("save", "save"),
    cell("save-offload", "save", placement="offload", optimizer="cpu"),
    cell("explicit", "explicit", door="fully_shard", precision="bf16"),
    cell("explicit-fp32", "explicit", door="fully_shard"),
    cell("explicit-changed", "explicit", "changed", door="fully_shard"),
    cell("explicit-freed", "explicit", "freed", door="fully_shard", precision="bf16"),
    cell("event", "event", door="fully_shard"),
    cell("own-comms", "own_comms", door="fully_shard"),
    cell("reduce-hook", "reduce_hook", door="fully_shard"),
    cell("reduce-hook-stream", "reduce_hook", "hook_stream", door="fully_shard"),
    cell("replicas-later", "hybrid", "replicas_later", door="fully_shard"),
    cell("reduce-group", "reduce_group", door="fully_shard"),
    cell("activation-checkpoints", "checkpoints", precision="bf16"),
    cell("state", "state", placement="device"),
    cell("state-offload", "state", placement="offload", door="fully_shard"),
    cell("summon", "summon", precision="bf16"),
    cell("eval", "eval", precision="bf16"),
    cell("write-offload", "write", placement="offload"),
    cell("fully_shard-write-offload", "write", placement="offload", door="fully_shard"),
    cell("scaler", "scaler", precision="fp16"),
    cell("nan-check", "nan_check"),
    cell("mixed-dtypes", "mixed_dtypes", door="fully_shard", precision="bf16"),
    cell("tensor-parallel", "tensor_parallel", door="fully_shard"),
    cell("subclass", "subclass", door="fully_shard"),
    cell("subclass-bf16", "subclass", door="fully_shard", precision="bf16"),
    cell("raises", "raises"),
    cell("raises-accumulate", "raises", "accumulate", "small_buckets"),
    cell("raises-offload", "raises", "small_buckets", placement="offload"),
    cell("raises-in-forward", "raises_in_forward"),
    cell("raises-in-hook", "raises_in_hook", "reduce_hook", "small_buckets", door="fully_shard"),
    cell("raises-in-hook-stream", "raises_in_hook", "reduce_hook", "hook_stream", "small_buckets", door="fully_shard"),
    cell("raises-in-comm-hook", "raises_in_hook", "hook"),
    cell("small-buckets-offload", "small_buckets", placement="offload"),
    cell("few-kept-offload", "small_buckets", "few_kept", placement="offload"),
    cell("clip-inf", "clip_inf"),
    cell("clip-ignored", "clip", "ignored"),
    cell("clip-inf-ignored", "clip_inf", "ignored"),
    cell("summon-grads", "summon_grads"),
    cell("own-comms-few", "own_comms", "few", door="fully_shard"),
    cell("state-rank0", "state_rank0"),
    cell("scalars", "scalars"),
    cell("bucketer", "bucketer"),
    cell("own-stream", "own_stream", "small_buckets"),
    cell("own-stream-raises", "own_stream", "small_buckets", "raises", "accumulate"),
    cell("own-stream-orig", "own_stream", "no_sync", door="orig"),
    cell("fully_shard-own-stream-offload", "own_stream", "clip", door="fully_shard", placement="offload"),
]
BY_NAME = {each.name: each for each in CELLS}

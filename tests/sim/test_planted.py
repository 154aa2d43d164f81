"""Without any one of its waits, events and held references the engine has a race, and the simulator shows it."""

import pytest
import torch
import torch.distributed as dist

from tests import sim
from tests.sim.cells import BY_NAME
from tests.sim.planted import planted, sites
from tests.sim.ranks import on_sim
from tests.sim.training import digest, train

CAUGHT = {
    "checkpoint.snapshot:Snapshot.__init__:record": "save",
    "checkpoint.snapshot:Snapshot.__init__:wait": "save",
    "checks.nan_check:NanCheck._gather:wait": "nan-check",
    "engine.backward:Backward.abandon:record": "raises-accumulate",
    "engine.backward:Backward.abandon:wait": "raises-accumulate",
    "engine.root:Root.wait_for_reads:record": "write-offload",
    "engine.root:Root.wait_for_reads:wait": "write-offload",
    "engine.shared:Shared.await_step:record": "wrapper-bf16-device",
    "engine.shared:Shared.await_step:wait": "wrapper-bf16-device",
    "engine.shared:Shared.note_free:record": "wrapper-bf16-device",
    "engine.unit:Unit.unshard:record": "writes-in-forward",
    "engine.unit:Unit.unshard:wait": "writes-in-forward",
    "engine.unit:Unit.unshard:wait-2": "wrapper-bf16-device",
    "extras.join.join:Join._count:wait": "join",
    "extras.join.join:Join._exchange:wait": "join",
    "nn.data_parallel.in_place.module:FSDPModule.unshard:wait": "explicit",
    "optim.early_steps:EarlySteps._step:wait": "held-overlap",
    "optim.early_steps:EarlySteps._take:record": "held-overlap",
    "optim.grad_norm:_over_ranks:wait": "clip-ignored",
    "optim.cpu_worker:GradStaging.fetch:wait": "held",
    "optim.sharded_grad_scaler:ShardedGradScaler._unscale_grads_:wait": "scaler",
    "extras.muon.matrix_exchange:MatrixExchange._received:wait": "muon-rows",
    "extras.muon.matrix_exchange:MatrixExchange._most_of:wait": "muon-rows",
    "views.orig_param:gather_rows:wait": "state",
    "params.flat_param:FlatParam.wait_unshard:wait": "wrapper-bf16-device",
    "params.gathered:Gathered.free:wait": "raises-in-forward",
    "params.gathered:Gathered.wait:wait": "wrapper-bf16-device",
    "params.shard_grad:GradTransfers.copy:hold": "small-buckets-offload",
    "params.shard_grad:GradTransfers.copy:record": "small-buckets-offload",
    "params.shard_grad:GradTransfers.copy:record-2": "small-buckets-offload",
    "params.shard_grad:GradTransfers.copy:wait": "small-buckets-offload",
    "params.shard_grad:GradTransfers.copy:wait-2": "few-kept-offload",
    "params.shard_grad:GradTransfers.wait:wait": "small-buckets-offload",
    "params.shard_grad:ShardGrad.land:wait": "small-buckets-offload",
    "state.full_params:_Whole._gather_grads:wait": "summon-grads",
    "utils.async_tensors:_Waited.forward:wait": "tensor-parallel",
    "utils.reduce_scatter_bucketer:ChunkBucket.reduce:wait": "bucketer",
    "utils.transfers:Chain.wait:wait": "fully_shard-hybrid@4",
    "utils.transfers:Chain.wait:wait-2": "fully_shard-hybrid@4",
    "utils.agree:agree:wait": "wrapper-bf16-device",
    "utils.collectives:RowGather.start:record": "hybrid",
    "utils.transfers:wait_all:wait": "wrapper-bf16-device",
    "utils.custom_comms:CustomGather.start:record": "own-comms-few@4",
    "utils.custom_comms:_wait:wait": "own-comms-few",
    "utils.messages:_exchange:wait": "state-rank0",
    "utils.messages:gather_scalars:wait": "scalars",
    "utils.ragged_tensor:RaggedTensor.__torch_dispatch__:wait": "blocks-scaler",
    "utils.ragged_tensor:gather_rows:wait": "blocks",
    "utils.ragged_tensor:_is_equal:wait": "blocks",
    "utils.rank_norms:largest_norms:wait": "blocks-clip-inf",
    "utils.rank_norms:joint_norms:wait": "blocks",
    "utils.buckets:Bucketer._land:wait": "small-buckets",
    "utils.buckets:Bucketer.deliver:wait": "small-buckets",
    "utils.buckets:Bucketer.launch:record": "small-buckets",
    "utils.buckets:Bucketer.launch:record-2": "small-buckets",
    "utils.buckets:Bucketer.launch:wait": "small-buckets",
    "utils.streams:Event.synchronize:wait": "wrapper-fp32-offload",
    "utils.hook_bucket:in_turn:record": "reduce-hook-stream",
    "utils.hook_bucket:in_turn:record-2": "reduce-hook-stream",
    "utils.hook_bucket:in_turn:wait": "hook",
    "utils.hook_bucket:in_turn:wait-2": "raises-in-comm-hook",
    "views.copied_out:CopiedOut._copy_out:wait": "fully_shard-bf16-device",
    "views.copied_out:CopyOuts.free:wait": "fully_shard-bf16-device",
    "utils.buckets:Bucketer.reduce:record": "fully_shard-medium-buckets",
    "views.copied_out:CopiedOut.start:record": "subclass@1",
    "views.copied_out:CopiedOut.start:record-2": "fully_shard-bf16-device",
    "views.copied_out:CopiedOut.start:record-3": "fully_shard-bf16-device",
    "views.copied_out:CopiedOut.start:wait": "subclass@1",
    "views.extended_param:Extension.first:wait": "subclass",
    "views.rows:JointGather.wait:wait": "mixed-dtypes",
}
"""Each site below ``fairshard.``, and the cell that has a race or other numbers without it; ``@4``: on four ranks."""

FAILED = "after a collective has failed; otherwise the end of the abandoned backward has waited before"
HOST = "a collective on tensors in host memory"
PINNED = "memory pinned in place must not be unpinned under a copy; the simulator pins in torch's way only"
THREAD = "waits for a thread, a process or a file, not for a device"
WORKS = "only the CPU has works that nobody has waited for here; on a device both gathers are on one stream"
ON_HOSTS = "only CPUs receive parameters in place"
DROPPED = "a model that is dropped after a backward has raised: tests/engine/test_exceptions.py, with --device sim"
EXCUSED = {
    "views.received_in_place:ReceivedInPlace._copy_out:wait": ON_HOSTS,
    "views.received_in_place:ReceivedInPlace.start:wait": ON_HOSTS,
    "params.gathered:Gathered.start:wait": WORKS,
    "views.extended_param:ExtendedGathered.start:wait": WORKS,
    "checkpoint.agreement:_Busy._send:wait": THREAD,
    "checkpoint.checkpointer:Checkpointer.load_latest:wait": THREAD,
    "checkpoint.checkpointer:Checkpointer.load_step:wait": THREAD,
    "checkpoint.checkpointer:Checkpointer.__exit__:wait": THREAD,
    "checkpoint.checkpointer:Checkpointer.close:wait": THREAD,
    "checkpoint.checkpointer:Checkpointer.save:wait": THREAD,
    "checkpoint.checkpointer:Checkpointer.save:wait-2": THREAD,
    "checkpoint.run_lock:RunLock._beat:wait": THREAD,
    "engine.exchange:_exchange:wait": HOST,
    "params.shard_grad:ShardGrad.discard_flights:wait": PINNED,
    "utils.messages:Poll.answer:wait": HOST,
    "utils.buckets:Bucketer.reset:wait": FAILED,
    "engine.shared:Shared.drop:record": DROPPED,
    "engine.shared:Shared.drop:wait": DROPPED,
    "params.shard_grad:GradTransfers.drop:wait": DROPPED,
    "checks.watchdog:Watchdog._serve:wait": THREAD,
    "checks.watchdog:Watchdog.explain:wait": THREAD,
}
"""Sites that no cell needs, and why they are there."""

SITES = {name.removeprefix("fairshard."): name for name in sites()}
FIRST_OF_FOLDERS = {name.partition(".")[0]: name for name in reversed(CAUGHT)}.values()


def plant(site, cell):
    """The parameters of the test of ``site`` in ``cell``; `make test` plants one site of each folder."""
    name, _, world_size = cell.partition("@")
    parameters = (site, name, int(world_size or 2))
    return pytest.param(*parameters, id=site, marks=[] if site in FIRST_OF_FOLDERS else pytest.mark.full)


PART_WAYS = ("extras.join.join:Join._count:wait", "extras.join.join:Join._exchange:wait")
"""Sites without which ranks do different things; all of them stop at their first race."""


def test_every_site_is_in_the_table():
    """Every wait, event and held reference of the source is planted or has a reason; the table names no other."""
    known = {*CAUGHT, *EXCUSED}
    assert not SITES.keys() - known, "plant these, or say why no device depends on them"
    assert not known - SITES.keys(), "these are no longer in the source"
    assert not CAUGHT.keys() & EXCUSED.keys(), "these are in both tables"


@pytest.mark.parametrize(("site", "name", "world_size"), [plant(*each) for each in CAUGHT.items()])
@on_sim(timeout=120.0)
def test_without_it_there_is_a_race(site, name, shared_folder):
    """The cell is right with the site, and has a race or gives other numbers without it."""
    cell = BY_NAME[name]
    expected, found = run(cell, f"{shared_folder}/whole", 0)
    assert not found, found[0]
    every = [False] * dist.get_world_size()
    for seed in range(5):  # steps on the optimizer's thread may be too late to race
        if not any(every):
            with planted(SITES[site]):
                sim.watch(raises=site in PART_WAYS)
                other, found = run(cell, f"{shared_folder}/planted{seed}", seed)
                sim.watch()
            dist.all_gather_object(every, bool(found) or other != expected)
    assert any(every), f"nothing depends on {site} in cell {name}"


def run(cell, folder, seed):
    """The digest of a run of ``cell`` in the order of ``seed``, and its races; no digest if it has raised."""
    sim.reset()
    sim.order_by_seed(seed)
    result = None
    try:
        result = digest(train(cell, folder))
        torch.accelerator.synchronize()
    except RuntimeError:
        assert sim.races()  # garbage from memory that was not written yet, or the race itself
    found = sim.races()
    sim.reset()
    return result, found

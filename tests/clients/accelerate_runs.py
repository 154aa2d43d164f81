"""accelerate: a loop with accumulation, clipping and bf16, which saves in the middle, loads and goes on."""

import contextlib
import functools
import tempfile
from unittest import mock

import torch
import torch.distributed as dist

from tests.clients.case import Case, Curve, engine_of
from tests.clients.loops import net, next_token_loss, tokens

# fp32 norms of sums that torch's engine rounds to bf16, and fairshard does not.
BF16 = {"rtol": 1e-3, "why": "sums of bf16 gradients are rounded once less"}
# The wrappers of both engines add the squares of a flat parameter in other chunks.
NORM = {"rtol": 1e-6, "why": "the norm is added in another order"}


@contextlib.contextmanager
def engine_chosen(engine):
    """accelerate on ``engine``, with CPU ranks allowed on both, and its global state new."""
    from fairshard.integrations import accelerate as integration

    names = {"FullyShardedDataParallel": _torchs_on_cpu()} if engine == "torch" else dict(integration.NAMES)
    with mock.patch.dict(integration.NAMES, names, clear=True), integration.enabled():  # lets CPU ranks have a plugin
        integration.AcceleratorState._reset_state(True)
        try:
            yield
        finally:
            integration.AcceleratorState._reset_state(True)


def _torchs_on_cpu():
    """FSDP1 on CPU wants a `device_id` without an index, and cannot broadcast; accelerate asks for both."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    class OnCPU(FullyShardedDataParallel):
        def __init__(self, module, *args, device_id=None, sync_module_states=False, **kwargs):
            super().__init__(module, *args, device_id=torch.device("cpu"), **kwargs)

    return OnCPU


def shared_folder():
    """A temporary folder, the same on all ranks."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    return folder[0]


def run(engine, version, precision="no", state="FULL_STATE_DICT", steps=4):
    """Four steps of two micro-batches; after the second, save, spoil the weights and load."""
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    curve = Curve()
    with engine_chosen(engine):
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=version,
            auto_wrap_policy="transformer_based_wrap",
            # FSDP1 cannot save a full state on CPU ranks: gathering it there raises.
            state_dict_type="SHARDED_STATE_DICT" if (engine, version) == ("torch", 1) else state,
            use_orig_params=True if version == 1 else None,
        )
        accelerator = Accelerator(
            cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=2, mixed_precision=precision
        )
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = accelerator.prepare(model, optimizer)
        curve.seen = engine_of(model)
        for step in range(steps):
            for micro in range(2):
                with accelerator.accumulate(model):
                    given = tokens(step, micro, dist.get_rank())
                    loss = next_token_loss(model(given), given)
                    accelerator.backward(loss)
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5) if accelerator.sync_gradients else None
                    optimizer.step()
                    optimizer.zero_grad()
            curve.add(loss, norm)
            if step == 1:
                folder = shared_folder()
                accelerator.save_state(folder)
                with torch.no_grad():
                    for param in model.parameters():
                        param.mul_(0.5)
                accelerator.load_state(folder)
    return curve


CASES = [
    Case(
        f"accelerate v{version}, {precision}, {state.split('_')[0].lower()} state",
        functools.partial(run, version=version, precision=precision, state=state),
        ("accelerate",),
        **(BF16 if precision == "bf16" else NORM if version == 1 else {}),
    )
    for version in (1, 2)
    for precision, state in [("no", "FULL_STATE_DICT"), ("bf16", "SHARDED_STATE_DICT")]
]

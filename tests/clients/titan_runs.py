"""torchtitan: debug models of llama3, and of qwen3 with experts, on CPU ranks, with its trainer and its checkpoints.

torchtitan wants a GPU. `titan_on_cpu` gives `torch.cpu` what it lacks, and the model takes dense attention, a tokenizer
and data that need no files.
"""

import contextlib
import functools
import os
import types
from dataclasses import dataclass
from unittest import mock

import torch
import torch.distributed as dist

from tests.clients.accelerate_runs import shared_folder
from tests.clients.case import Case, Curve, engine_of

SEQ_LEN, VOCAB = 32, 2048


@contextlib.contextmanager
def titan_on_cpu(engine):
    """torchtitan on CPU ranks: `torch.cpu` has the functions that its metrics ask of a device."""
    stubs = {
        "get_device_name": lambda device=None: "cpu",
        "get_device_properties": lambda device=None: types.SimpleNamespace(name="cpu", total_memory=1 << 34),
        "memory_stats": lambda device=None: {},
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "current_device": lambda: 0,
        "device_count": lambda: int(os.environ["WORLD_SIZE"]),
        "set_device": lambda device: None,
    }
    with contextlib.ExitStack() as stack:
        for name, stub in stubs.items():
            stack.enter_context(mock.patch.object(torch.cpu, name, stub, create=True))
        stack.enter_context(mock.patch("torch._utils._get_available_device_type", return_value="cpu"))
        import torchtitan.distributed.utils as dist_utils
        import torchtitan.trainer
        from torchtitan.tools import utils

        cpu = torch.device("cpu")
        stack.enter_context(mock.patch.object(utils, "get_local_device", return_value=cpu))
        stack.enter_context(mock.patch.object(dist_utils, "get_local_device", return_value=cpu))
        stack.enter_context(mock.patch.object(dist_utils, "init_distributed", return_value=dist.get_world_size()))
        stack.enter_context(mock.patch.object(dist_utils, "set_pg_timeouts"))  # gloo has none to set
        if engine == "fairshard":
            from fairshard.integrations import torchtitan as integration

            stack.enter_context(integration.enabled())
        yield torchtitan.trainer.Trainer


def _data():
    from torchtitan.components.dataloader import BaseDataLoader, ParallelAwareDataloader
    from torchtitan.components.tokenizer import BaseTokenizer

    class Tokens(torch.utils.data.IterableDataset):
        """Sequences that depend on the rank and their number only."""

        def __init__(self, dp_rank, seq_len):
            self.dp_rank, self.seq_len, self.index = dp_rank, seq_len, 0

        def __iter__(self):
            while True:
                random = torch.Generator().manual_seed(1000 * self.dp_rank + self.index)
                self.index += 1
                row = torch.randint(VOCAB // 8, (self.seq_len + 1,), generator=random)
                yield {"input": row[:-1], "positions": torch.arange(self.seq_len)}, row[1:]

        def state_dict(self):
            return {"index": self.index}

        def load_state_dict(self, state):
            self.index = state["index"]

    class Loader(ParallelAwareDataloader):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(self, config, *, dp_world_size, dp_rank, tokenizer, seq_len, local_batch_size, **unused):
            super().__init__(
                Tokens(dp_rank, seq_len), dp_rank=dp_rank, dp_world_size=dp_world_size, batch_size=local_batch_size
            )

    class NoTokenizer(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config=None, *, tokenizer_path=None):
            pass

        def encode(self, text, **unused):
            raise NotImplementedError

        def decode(self, ids, **unused):
            raise NotImplementedError

        def get_vocab_size(self):
            return VOCAB

    return Loader.Config(), NoTokenizer.Config()


def _config(folder, steps, options):
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3.config_registry import llama3_debugmodel
    from torchtitan.models.qwen3.config_registry import qwen3_moe_debug

    config = qwen3_moe_debug() if options.get("ep") else llama3_debugmodel()
    config.model_spec.model.layers = config.model_spec.model.layers[: options.get("layers", 2)]
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.dump_folder = folder
    config.dataloader, config.tokenizer = _data()
    config.validator.enable = False
    config.training.local_batch_size = 4 if options.get("pp") else 2
    config.training.seq_len = SEQ_LEN
    config.training.steps = steps
    config.training.disable_cuda_graphs = True
    config.training.mixed_precision_param = options.get("dtype", "float32")
    config.debug.seed = 7
    config.activation_checkpoint = None
    if options.get("full_ac"):
        from torchtitan.distributed.activation_checkpoint import FullAC

        config.activation_checkpoint = FullAC.Config()
    parallel = config.parallelism
    parallel.spmd_backend = options.get("backend", "partial_dtensor")
    parallel.data_parallel_replicate_degree = options.get("replicate", 1)
    parallel.tensor_parallel_degree = options.get("tp", 1)
    parallel.expert_parallel_degree = options.get("ep", 1)
    parallel.pipeline_parallel_degree = options.get("pp", 1)
    parallel.pipeline_parallel_schedule = "1F1B"
    config.compile.enable = options.get("compiled", False)
    config.compile.components = ["model"]
    config.compile.backend = "aot_eager"
    config.checkpoint.enable = options.get("saves", False)
    config.checkpoint.interval = 2
    if options.get("resumes"):
        config.checkpoint.exclude_from_loading = ["dataloader"]  # its state is that of each data-parallel rank
    return config


def run(engine, folder=None, steps=4, **options):
    """Losses and norms that torchtitan's trainer logs."""
    curve = Curve()
    with titan_on_cpu(engine) as trainer_class:
        trainer = trainer_class(_config(folder or shared_folder(), steps, options))
        curve.seen = engine_of(trainer.model_parts[0])
        for module in (module for part in trainer.model_parts for module in part.modules()):
            if engine == "torch" and hasattr(module, "set_force_sum_reduction_for_comms"):
                module.set_force_sum_reduction_for_comms(True)  # with factor 1 it asks gloo for an operator it lacks

        def log(step, loss, max_loss, norm, *unused, **unused_too):
            curve.losses.append(float(loss))
            curve.norms.append(float(norm))

        trainer.metrics_processor.log = log
        trainer.metrics_processor.should_log = lambda step: True
        trainer.train()
        trainer.close()
    return curve


def resume(engine):
    """Save at step 2 on the first two ranks, and resume on all four."""
    from tests.clients.table import run_program

    folder = shared_folder()
    if dist.get_rank() == 0:
        run_program("torchtitan: save on 2", engine, 2, {"FAIRSHARD_CLIENTS_FOLDER": folder})
    dist.barrier()
    return run(engine, folder, saves=True, resumes=True)


def save_two(engine):
    """Two steps, saved."""
    return run(engine, os.environ.get("FAIRSHARD_CLIENTS_FOLDER"), steps=2, saves=True)


def _case(name, world_size=2, program=run, rtol=0.0, why="", **options):
    function = functools.partial(program, **options) if options else program
    return Case(f"torchtitan: {name}", function, ("torchtitan",), world_size, rtol, why)


ADDITION = {"rtol": 1e-6, "why": "gloo adds ranks in another order"}
CASES = [
    _case("plain"),
    _case("HSDP on 4", 4, replicate=2, **ADDITION),
    _case("FullAC", full_ac=True),
    _case("save on 2", program=save_two),
    _case("save on 2, resume on 4", 4, program=resume, **ADDITION),
    _case("TP 2", 4, tp=2, **ADDITION),
    _case("EP 2, mixture of experts", ep=2),
    _case("PP 2", 4, pp=2, **ADDITION),
    _case("compiled blocks", compiled=True),
    _case("backend full_dtensor", backend="full_dtensor"),
    _case("backend spmd_types", backend="spmd_types"),
]

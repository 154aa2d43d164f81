"""The Hugging Face Trainer: a tiny Llama, full and sharded checkpoints, LoRA, and torch_compile."""

import contextlib
import functools
import os

import torch
import torch.distributed as dist

from tests.clients.accelerate_runs import BF16, NORM, engine_chosen, shared_folder
from tests.clients.case import Case, Curve, engine_of
from tests.clients.loops import VOCAB, tokens


def llama():
    """A Llama of two layers with random weights, the same on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "max_position_embeddings": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    special = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **special))


def with_lora(model):
    """``model`` with LoRA on its attention."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(4)
    return get_peft_model(model, LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"]))


class Rows(torch.utils.data.Dataset):
    """Eight sequences that depend on their index only."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        ids = tokens("rows", index, rows=1)[0]
        return {"input_ids": ids, "labels": ids}


def run(engine, version, state="FULL_STATE_DICT", lora=False, precision="no", compiled=False, resumes=True):
    """Four steps of two micro-batches; a second Trainer resumes from the checkpoint of step two."""
    from transformers import TrainerCallback

    curve = Curve()
    if (engine, version) == ("torch", 1):
        # FSDP1 cannot save a full state on CPU ranks; accelerate does not load a sharded one into a new optimizer.
        version, state = (2, state) if resumes else (1, "SHARDED_STATE_DICT")

    class Recorder(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            if "loss" in logs:
                curve.losses.append(logs["loss"])
                curve.norms.append(float(logs["grad_norm"]))

    with engine_chosen(engine):
        folder = shared_folder()
        trainer = _trainer(folder, version, state, lora, precision, compiled)
        trainer.add_callback(Recorder())
        trainer.train()
        curve.seen = engine_of(trainer.model_wrapped)
        if resumes:
            resumed = _trainer(folder, version, state, lora, precision, compiled)
            resumed.add_callback(Recorder())
            resumed.train(resume_from_checkpoint=os.path.join(folder, "checkpoint-2"))
    return curve


def _trainer(folder, version, state, lora, precision, compiled):
    from accelerate.state import AcceleratorState
    from transformers import Trainer, TrainingArguments

    AcceleratorState._reset_state(True)
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        max_steps=4,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=2,
        seed=5,
        bf16=precision == "bf16",
        torch_compile=compiled,
        report_to=[],
        disable_tqdm=True,
        logging_nan_inf_filter=False,
        dataloader_pin_memory=False,
        fsdp="full_shard auto_wrap",
        fsdp_config={
            "version": version,
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "state_dict_type": state,
            **({"use_orig_params": True} if version == 1 else {}),
        },
    )
    model = llama()
    with contextlib.redirect_stdout(None) if dist.get_rank() else contextlib.nullcontext():
        return Trainer(with_lora(model) if lora else model, arguments, train_dataset=Rows())


def _case(name, why="", **options):
    extra = {"rtol": options.pop("rtol", 0.0), "why": why}
    return Case(f"Trainer {name}", functools.partial(run, **options), ("transformers", "accelerate"), **extra)


CASES = [
    _case("v1, full state", version=1, state="FULL_STATE_DICT", **NORM),
    _case("v1, sharded state", version=1, state="SHARDED_STATE_DICT", **NORM),
    _case("v2, full state", version=2, state="FULL_STATE_DICT"),
    _case("v2, sharded state, bf16", version=2, state="SHARDED_STATE_DICT", precision="bf16", **BF16),
    _case("v1, LoRA", version=1, lora=True, resumes=False, **NORM),
    _case("v2, LoRA", version=2, lora=True, resumes=False),
    _case("v2, torch_compile", version=2, compiled=True, resumes=False),
]

"""Other people's trainers on fairshard: accelerate and the Hugging Face Trainer, Lightning, torchtitan.

One file per package. Each uses only fairshard's public names, and imports its package when it is itself imported. The
engine imports none of them. May import: everything but `fairshard.cli`.

- `fairshard.integrations.accelerate`: ``enable()`` before ``Accelerator`` or ``Trainer``
- `fairshard.integrations.lightning`: ``FairshardStrategy`` for ``Trainer``
- `fairshard.integrations.torchtitan`: ``enable()`` before the trainer is built
- `fairshard.integrations.torch_names`: puts fairshard's objects in the place of those of ``torch.distributed.fsdp``
"""

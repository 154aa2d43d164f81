"""Names in a module tree, as if nothing were wrapped."""

from __future__ import annotations

COMPILED = "_orig_mod"  # from torch.compile, which leaves it in state dicts, unlike torch's checkpoint wrapper
_WRAPPERS = {"_fsdp_wrapped_module", "_checkpoint_wrapped_module", COMPILED}


def join(prefix: str, name: str) -> str:
    """``prefix.name``, or the non-empty one of the two."""
    return f"{prefix}.{name}" if prefix and name else prefix or name


def clean_tensor_name(name: str) -> str:
    """The name of a parameter or buffer without the parts added by wrappers."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)

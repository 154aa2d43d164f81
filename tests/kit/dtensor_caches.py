"""The caches of DTensor, which keep meshes, and with them process groups, alive."""

from __future__ import annotations

import contextlib
import importlib
import operator
import sys

import torch

_NAMES = ("_clear_sharding_prop_cache", "_clear_python_sharding_prop_cache")  # the second in older torch
_OTHERS = (  # of caches that those leave
    ("torch.distributed.tensor._redistribute", "clear_redistribute_planner_cache"),
    ("torch.distributed.tensor._redistribute", "_gen_transform_infos.cache_clear"),
    ("torch.distributed.tensor._collective_utils", "MeshTopoInfo.build_from_mesh.cache_clear"),
    ("torch.distributed.tensor._sharding_prop", "ShardingPropagator._propagate_tensor_meta_cached.cache_clear"),
)


def clear_dtensor_caches(device: torch.device | str) -> None:
    """Clear those of this thread, and of the thread in which autograd runs backwards for ``device``."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    debug = importlib.import_module("torch.distributed.tensor.debug")
    clear = next((getattr(debug, name) for name in _NAMES if hasattr(debug, name)), None)
    if clear is None:
        return
    clear()
    for module, name in _OTHERS:
        with contextlib.suppress(KeyError, AttributeError):  # not imported, or not in this torch
            operator.attrgetter(name)(sys.modules[module])()
    probe = torch.ones((), device=device, requires_grad=True)
    probe.register_hook(lambda _: clear())
    probe.backward()

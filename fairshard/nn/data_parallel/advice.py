"""What users are told about a model that is right, but takes more memory than it must."""

from __future__ import annotations

import warnings
from typing import Any

# Above the functions here, the unit's or root's method, the wrapper and nn.Module: the user's call.
_STACKLEVEL = 5


def warn_opaque_outputs(fqn: str, outputs: Any) -> None:
    """Unit ``fqn`` stays gathered because of what it returned."""
    warnings.warn(
        f"Unit `{fqn or 'root'}` returned {type(outputs).__name__}, which holds objects that fairshard cannot look "
        "into. It stays gathered from now on, since a backward through them could not be seen in time. Return tensors "
        "in tuples, lists, dicts or dataclasses.",
        stacklevel=_STACKLEVEL,
    )

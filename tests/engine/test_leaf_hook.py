"""The hook on leaves runs the engine untraced."""

import pytest
import torch

from fairshard.engine.leaf_hook import leaf_hook
from fairshard.utils.dynamo import set_tracer


def test_the_tracer_is_off_while_a_leaf_hook_runs():
    """The engine's work at a gradient is not traced; afterwards the tracer is the one before, also if it raises."""

    class Engine:
        backward = None

        def accumulate(self, unit):
            seen.append(set_tracer(None))
            raise KeyError(unit.name)

    class Owner:
        name = "on purpose"

    seen, engine, owner = [], Engine(), Owner()
    hook = leaf_hook(engine, owner)
    set_tracer(False)  # torch's mode that runs compiled code and traces nothing new
    try:
        with pytest.raises(KeyError, match="on purpose"):
            hook(torch.ones(1))
    finally:
        after = set_tracer(None)
    assert seen == [None]
    assert after is False

"""What the tests of users' mistakes share."""

import re

import pytest
import torch
from torch import nn

BATCH = torch.ones(2, 4)


def layer():
    return nn.Linear(4, 4)


def two():
    return nn.Sequential(layer(), layer())


def loss_of(model):
    return model(BATCH).square().sum()


def check(mistake):
    """Run ``mistake``, a kind of error, the parts of its message in their order, and the call that raises it."""
    kind, says, call = mistake
    with pytest.raises(kind, match="(?s)" + ".*".join(map(re.escape, says))):
        call()

"""What is said of a backward that a unit cannot follow."""

from __future__ import annotations

from fairshard.errors import GradRequiresGradError, ParameterShardedError


def create_graph_error(fqn: str) -> GradRequiresGradError:
    """Gradients of unit ``fqn`` are asked for that can be differentiated again."""
    return GradRequiresGradError(
        f"Gradients of a sharded unit must not require grad, but the backward of `{fqn or 'the root'}` was started "
        "with create_graph=True. Sharded gradients cannot be differentiated again; compute such terms on an unwrapped "
        "module."
    )


def unseen_error(fqn: str) -> ParameterShardedError:
    """A backward has come to leaves of unit ``fqn`` that are not gathered."""
    return ParameterShardedError(
        f"A backward came to the parameters of unit `{fqn or 'root'}` while they were sharded, through a tensor that "
        "the unit did not return. Return every tensor that the loss is made of."
    )

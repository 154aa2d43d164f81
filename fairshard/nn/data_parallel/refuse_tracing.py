"""torch.compile around a wrapper is refused: what gathers and frees memory must run, not be traced."""

from typing import NoReturn

from fairshard.errors import FairshardError


def refuse_tracing() -> NoReturn:
    """Raise while torch.compile traces the call of a wrapper.

    Raises:
        FairshardError: always.
    """
    raise FairshardError(
        "torch.compile must not go around a FullyShardedDataParallel, whose gathers it cannot trace. Compile what is "
        "inside of each wrapper instead: `FullyShardedDataParallel(torch.compile(block))`."
    )


# What `torch.compiler.assume_constant_result` sets, without its import of the compiler: tracing calls the function,
# where a plain `raise` would only end the graph, and the engine's own functions be traced one by one.
refuse_tracing._dynamo_marked_constant = True  # type: ignore[attr-defined]

"""torch.compile around a sharded module is refused: what gathers and frees memory must run, not be traced."""

from typing import NoReturn

from fairshard.errors import FairshardError


def refuse_tracing() -> NoReturn:
    """Raise while torch.compile traces the call of a sharded module.

    Raises:
        FairshardError: always.
    """
    raise FairshardError(
        "torch.compile must not go around a sharded module, whose gathers it cannot trace. Compile what is inside "
        "instead: `FullyShardedDataParallel(torch.compile(block))`, `fully_shard(torch.compile(block))`."
    )


# What `torch.compiler.assume_constant_result` sets, without its import of the compiler: tracing calls the function,
# where a plain `raise` would only end the graph, and the engine's own functions be traced one by one.
refuse_tracing._dynamo_marked_constant = True  # type: ignore[attr-defined]

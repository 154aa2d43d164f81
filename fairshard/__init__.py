"""fairshard: a ZeRO-3 engine for PyTorch in plain Python."""

from fairshard.errors import FairshardError

__version__ = "0.5.0"
__all__ = ["FairshardError", "__version__"]

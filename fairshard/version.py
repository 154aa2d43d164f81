"""The version of fairshard."""

__version__ = "0.5.0"

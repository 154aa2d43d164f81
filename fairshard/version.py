"""The version of fairshard."""

__version__ = "0.6.0"

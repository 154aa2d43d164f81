"""The old path of `fairshard.planning.summary`."""

from fairshard.utils.moved import moved

__getattr__ = moved(__name__, "fairshard.planning.summary")

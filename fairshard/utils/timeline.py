"""The old path of `fairshard.observe.timeline`."""

from fairshard.utils.moved import moved

__getattr__ = moved(__name__, "fairshard.observe.timeline")

"""The old path of `fairshard.observe.unit_event`."""

from fairshard.utils.moved import moved

__getattr__ = moved(__name__, "fairshard.observe.unit_event")

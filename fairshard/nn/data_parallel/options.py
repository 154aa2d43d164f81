"""The old path of `fairshard.settings.fsdp1`."""

from fairshard.utils.moved import moved

__getattr__ = moved(__name__, "fairshard.settings.fsdp1")

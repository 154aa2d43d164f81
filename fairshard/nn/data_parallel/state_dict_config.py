"""The old path of `fairshard.settings.state_dicts`."""

from fairshard.utils.moved import moved

__getattr__ = moved(__name__, "fairshard.settings.state_dicts")

"""The old path of `fairshard.plan.summary`."""

from fairshard.utils.moved import moved

__getattr__ = moved(__name__, "fairshard.plan.summary")

"""Views of flat params: what optimizers and users see of a shard.

Flat params of which the original parameters are registered, as runs of the shard or as DTensors, with their gradients,
and gathers that several flat params share.

May import from this folder and from errors, utils, settings, params, engine.
"""

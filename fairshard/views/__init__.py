"""Views of flat params: the parameters that optimizers and users see.

Contains original parameters that are registered as runs of the shard or as DTensors, their gradients, lines whose
parameters are copied out of the gathered memory, and gathers that several flat params share.

May import from this folder and from errors, utils, settings, params, engine.
"""

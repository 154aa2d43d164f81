"""Flat params: the shard, the gather buffer, the leaves and the gradient of some parameters.

Also handles the place of each parameter in the module tree, the layout of parameters on one line, the memory of
gradients, and the buffers of a unit.

May import from this folder and from errors, utils.
"""

"""Flat params: the shard, the gather buffer, the leaves and the gradient of some parameters.

Where each parameter is in the module tree, how parameters lie side by side in one line, where gradients are kept, and
the buffers of a unit.

May import from this folder and from errors, utils, settings.
"""

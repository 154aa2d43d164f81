"""Setting up: from a module to units, and from units to a model.

Ignored modules, modules on the meta device, sharding, parameters that units share, devices, changes between wrapping
and the first forward, and the claim of all units by a root.

May import from this folder and from errors, utils, settings, params, engine, views, checks, observe, join.
"""

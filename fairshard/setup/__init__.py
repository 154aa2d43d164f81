"""Setup: makes units from modules, and a model from units.

Handles ignored modules, modules on the meta device, sharding, parameters that units share, devices, changes between
wrapping and the first forward, and the claim of all units by a root.

May import from this folder and from errors, utils, settings, params, engine, views, checks.
"""

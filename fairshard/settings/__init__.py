"""Settings: a user's options, checked once and frozen.

The options of both entry points, the resolved settings of a unit, its process groups and mesh, and the forms of state
dicts. Nothing here holds a parameter.

May import from this folder and from errors, utils, params, engine.
"""

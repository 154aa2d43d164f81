"""Settings: what a user asked for, checked once and frozen.

The options of both doors, the resolved settings of one unit, the groups and the mesh that it is sharded over, and the
forms of state dicts. Nothing here holds a parameter.

May import from this folder and from errors, utils.
"""

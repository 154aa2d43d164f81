"""The engine: when parameters are gathered, computed with, reduced and freed.

Units, the root that they share, calls, the order of units and what is gathered ahead, and how units are found in a
module tree.

May import from this folder and from errors, utils, params.
"""

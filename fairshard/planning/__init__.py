"""Plans: which modules become units, and the cost of a wrapped model in memory and messages.

May import from this folder and from errors, utils, settings, params, engine, views, checks, observe, join, setup,
state.
"""

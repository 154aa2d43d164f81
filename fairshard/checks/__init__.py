"""Checks: that ranks agree on the model and its order, that gradients are finite, and that optimizers fit shards.

May import from this folder and from errors, utils, settings, params, engine, views.
"""

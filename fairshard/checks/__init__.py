"""Checks: ranks agree on the model and on its order, gradients are finite, optimizers fit.

May import from this folder and from errors, utils, settings, params, engine, views.
"""

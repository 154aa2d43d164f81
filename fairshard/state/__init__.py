"""State: state dicts of models and of optimizers in every form, and whole parameters to look at.

May import from this folder and from errors, utils, settings, params, engine, views, checks, observe, join, setup.
"""

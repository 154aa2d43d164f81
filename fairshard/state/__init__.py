"""State: state dicts of models and optimizers in every form, and access to whole parameters.

May import from this folder and from errors, utils, settings, params, engine, views, checks, setup.
"""

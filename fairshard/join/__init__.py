"""Training while some ranks have no batches left.

May import from this folder and from errors, utils, settings, params, engine, views, checks, observe.
"""

"""The observer: events of a training step, and pictures of them.

May import from this folder and from errors, utils, settings, params, engine, views, checks.
"""

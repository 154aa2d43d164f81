"""Training in which some ranks run out of batches earlier than others.

May import from this folder and from errors, utils, settings, params, engine, views, checks, observe.
"""

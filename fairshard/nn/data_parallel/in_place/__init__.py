"""Modules after `fully_shard`: their methods, and their hooks for loading and registration.

May import from this folder and from every other but cli.
"""

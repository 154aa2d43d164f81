"""What a module is after `fully_shard`: its methods, and the hooks that load and register.

May import from this folder and from every other but cli.
"""

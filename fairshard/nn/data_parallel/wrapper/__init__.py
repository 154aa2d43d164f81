"""The methods of the wrapper, `FullyShardedDataParallel`, by topic.

May import from this folder and from every other but cli.
"""

"""What plugs into the engine: each folder can be deleted, and everything below still passes its tests.

May import from this folder and from every room below it; the folders do not know each other.
"""

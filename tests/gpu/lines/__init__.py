"""The checks, in one module for each kind of line; importing a module binds its lines."""

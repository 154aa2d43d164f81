"""``make gpu``: runs every line of docs/notes/gpu.md on the accelerator that is there, and ticks those that pass.

``page.py`` reads the list and ticks it; ``check.py`` binds lines to checks; ``lines/`` has the checks; ``parts.py``
runs them in parts of limited time; ``results.py`` writes what has finished, at once; ``report.py`` makes a page of it.
"""

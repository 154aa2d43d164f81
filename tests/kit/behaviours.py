"""Which file of tests is the home of which behaviour, read from their marks; writes ``tests/behaviours.md``.

    python -m tests.kit.behaviours

A file says it at its top: ``pytestmark = pytest.mark.behaviour("no_sync")``. What else holds with that behaviour, such
as another door or precision, is a parameter of a test there or an axis of a matrix, not a file.
"""

import ast
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = TESTS / "behaviours.md"
HEAD = """# Where each behaviour is tested

Written by `python -m tests.kit.behaviours` from the marks at the top of each file of tests. A behaviour has one home.

| behaviour | tested in | what is claimed |
|---|---|---|
"""


def homes():
    """``(behaviour, path, what is claimed)`` of every mark, by behaviour."""
    found = []
    for path in sorted(TESTS.rglob("test_*.py")):
        tree = ast.parse(path.read_text())
        for statement in tree.body:
            if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "pytestmark":
                claim = ast.get_docstring(tree).split("\n\n")[0].replace("\n", " ")
                found += [(name, path, claim) for name in _marked(statement.value)]
    return sorted(found)


def _marked(value):
    """The behaviours that a ``pytestmark`` names."""
    for node in ast.walk(value):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.behaviour":
            yield from (argument.value for argument in node.args)


def page():
    """The text of the page."""
    found = [(name, path.relative_to(TESTS), claim) for name, path, claim in homes()]
    return HEAD + "".join(f"| {name} | [{path}]({path}) | {claim} |\n" for name, path, claim in found)


if __name__ == "__main__":
    PAGE.write_text(page())

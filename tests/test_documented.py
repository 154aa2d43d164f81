"""Names that the docs show are public where the docs say that they are."""

import ast
import importlib
import re
from pathlib import Path

import pytest

from tests.test_docs import PAGES, ROOT, blocks

DIRECTIVE = re.compile(r"^\.\. auto(module|class|function):: (\S+)", re.MULTILINE)


def names_on_pages():
    """``(page, module, name)`` of everything that python blocks import from fairshard; no name for the module alone."""
    inner = (path.relative_to(ROOT).as_posix() for path in (ROOT / "docs" / "integrations").glob("*.md"))
    for page in [*PAGES, *inner]:
        for block in blocks(page):
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fairshard":
                    yield from ((page, node.module, alias.name) for alias in node.names)


def names_in_reference():
    """``(page, module, name)`` of what the reference documents."""
    for kind, target in DIRECTIVE.findall(Path(ROOT / "docs" / "api.md").read_text()):
        module, _, name = target.rpartition(".")
        yield ("docs/api.md", target, None) if kind == "module" else ("docs/api.md", module, name)


@pytest.mark.parametrize(("page", "module", "name"), sorted({*names_on_pages(), *names_in_reference()}, key=str))
def test_documented_names_are_public(page, module, name):
    """The module that a page names has an ``__all__`` with the names that the page takes from it."""
    found = importlib.import_module(module)
    assert hasattr(found, "__all__"), f"{module}, on {page}, does not say what is public"
    public = found.__all__
    if name is not None and name not in public:
        importlib.import_module(f"{module}.{name}")  # a module that has its own row
    assert all(hasattr(found, each) for each in public)

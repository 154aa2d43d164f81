"""Names that the docs show are public where the docs say that they are."""

import ast
import importlib

import pytest

from tests.test_docs import PAGES, ROOT, blocks


def names_on_pages():
    """``(page, module, name)`` of everything that python blocks import from fairshard."""
    inner = (path.relative_to(ROOT).as_posix() for path in (ROOT / "docs" / "integrations").glob("*.md"))
    for page in [*PAGES, *inner]:
        for block in blocks(page):
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fairshard":
                    yield from ((page, node.module, alias.name) for alias in node.names)


@pytest.mark.parametrize(("page", "module", "name"), sorted(set(names_on_pages())))
def test_documented_names_are_public(page, module, name):
    """The module that a page names has an ``__all__`` with the names that the page takes from it."""
    found = importlib.import_module(module)
    assert hasattr(found, "__all__"), f"{module}, on {page}, does not say what is public"
    public = found.__all__
    if name not in public:
        importlib.import_module(f"{module}.{name}")  # a module that has its own row
    assert all(hasattr(found, each) for each in public)

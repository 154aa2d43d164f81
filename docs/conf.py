"""Sphinx settings; `make docs` builds with warnings as errors."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import api_pages
import drawing
import notebooks

project = "fairshard"
author = "The fairshard authors"
copyright = "2026, The fairshard authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "changelog.d"]
html_theme = "furo"
html_title = "fairshard"
html_static_path = ["_static"]
html_css_files = ["fairshard.css"]
html_copy_source = False
default_role = "any"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"show-inheritance": True}
toc_object_entries_show_parents = "hide"
# A longer signature has one argument a line.
maximum_signature_line_length = 80
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
# Docstrings use `name` for what stands nearby; names of torch have no target here.
nitpicky = False
suppress_warnings = ["ref.any", "ref.ref"]


def setup(app):
    """Write the pages of the API before Sphinx looks for pages."""
    app.connect("builder-inited", api_pages.write)
    app.add_directive("drawing", drawing.Drawing)
    app.add_directive("plot", drawing.Plot)
    app.add_directive("notebook", notebooks.Notebook)

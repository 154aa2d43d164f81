"""Sphinx settings; `make docs` builds with warnings as errors."""

project = "fairshard"
author = "The fairshard authors"
copyright = "2026, The fairshard authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "changelog.d"]
html_theme = "furo"
html_static_path = ["_static"]
default_role = "any"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True}
myst_heading_anchors = 3
# Docstrings use `name` for what stands nearby; names of torch have no target here.
nitpicky = False
suppress_warnings = ["ref.any", "ref.ref"]

"""Directives for pictures that follow the page from light to dark."""

from __future__ import annotations

from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import Directive, directives

STATIC = Path(__file__).parent / "_static"


class Drawing(Directive):
    """``{drawing} NAME``: the SVG ``_static/NAME.svg`` inside the page, where it takes the page's colours.

    The body describes it in words, for those who do not see it.
    """

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        """The figure."""
        path = STATIC / f"{self.arguments[0]}.svg"
        self.state.document.settings.record_dependencies.add(str(path))
        words = " ".join(self.content)
        svg = path.read_text()
        svg = svg[svg.index("<svg") :].replace("<svg ", f'<svg role="img" aria-label="{words}" ', 1)
        html = f'<figure class="drawing"><div class="scrolls">{svg}</div><figcaption>{words}</figcaption></figure>'
        return [nodes.raw("", html, format="html")]


class Plot(Directive):
    """``{plot} NAME``: ``_static/plots/NAME-light.svg`` or ``-dark.svg``; the body describes it in words."""

    required_arguments = 1
    has_content = True
    option_spec = {"width": directives.unchanged}

    def run(self) -> list[nodes.Node]:
        """Both pictures, of which the theme shows one."""
        words = " ".join(self.content)
        source = Path(str(self.state.document.current_source))
        up = "../" * (len(source.resolve().relative_to(STATIC.parent).parts) - 1)
        found = nodes.container(classes=["plot-scrolls"])
        for mode in ("light", "dark"):
            image = nodes.image(uri=f"{up}_static/plots/{self.arguments[0]}-{mode}.svg", alt=words)
            image["classes"] += [f"only-{mode}", "plot"]
            found += image
        return [found, nodes.caption("", words, classes=["plot-caption"])] if words else [found]

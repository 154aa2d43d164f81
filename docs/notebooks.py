"""The notebooks of the docs: ``python docs/notebooks.py`` runs them and writes their outputs; a directive shows them.

Neither needs Jupyter. A notebook runs as in a kernel: its cells in one namespace, ``__main__`` without a file.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import html
import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList

DOCS = Path(__file__).parent
NOTEBOOKS = sorted(path for path in DOCS.rglob("*.ipynb") if "_build" not in path.parts)


def played(path: Path) -> list[dict[str, Any]]:
    """The cells of a notebook with new outputs, run by a new interpreter in an empty folder.

    Raises:
        RuntimeError: a cell raised.
    """
    command = "import sys; from notebooks import play; play(sys.argv[1])"
    search = os.pathsep.join([str(DOCS), str(DOCS.parent)])
    with tempfile.TemporaryDirectory() as folder:
        found = subprocess.run(
            [sys.executable, "-c", command, str(path.resolve())],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": search},
            capture_output=True,
            text=True,
        )
    if found.returncode:
        raise RuntimeError(f"{path.name} must run from its first cell to its last, but: {found.stderr}")
    cells: list[dict[str, Any]] = json.loads(found.stdout)
    return cells


def play(path: str) -> None:
    """Run every cell in ``__main__`` and print the cells with their outputs as JSON."""
    names = sys.modules["__main__"].__dict__
    cells = json.loads(Path(path).read_text())["cells"]
    count = 0
    for cell in cells:
        if cell["cell_type"] == "code":
            count += 1
            cell.update(execution_count=count, outputs=_outputs("".join(cell["source"]), names, count))
    print(json.dumps(cells))


def _outputs(source: str, names: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Run one cell: what it prints, then the value of its last line, in the form of notebooks."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, f"cell {count}", "exec"), names)
        value = eval(compile(ast.Expression(last.value), f"cell {count}", "eval"), names) if last else None
    found: list[dict[str, Any]] = []
    if printed.getvalue():
        found.append({"name": "stdout", "output_type": "stream", "text": _lines(printed.getvalue())})
    if value is not None:
        result = {"data": _forms(value), "execution_count": count, "metadata": {}, "output_type": "execute_result"}
        found.append(result)
    return found


def _forms(value: Any) -> dict[str, Any]:
    """A value as text or picture: whatever it offers to notebooks."""
    if hasattr(value, "_repr_png_"):
        return {"image/png": base64.b64encode(value._repr_png_()).decode(), "text/plain": ["a picture"]}
    return {"text/plain": _lines(repr(value))}


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


class Notebook(Directive):
    """``{notebook} FILE``: the cells after the first, which is the title, with their outputs."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Text as Markdown, code as code, outputs below it."""
        path = Path(str(self.state.document.current_source)).parent / self.arguments[0]
        self.state.document.settings.record_dependencies.add(str(path))
        found: list[nodes.Node] = []
        for cell in json.loads(path.read_text())["cells"][1:]:
            source = "".join(cell["source"])
            if cell["cell_type"] == "markdown":
                text = nodes.Element()
                self.state.nested_parse(StringList(source.splitlines(), str(path)), self.content_offset, text)
                found += text.children
            else:
                found.append(nodes.literal_block(source, source, language="python"))
                found += [_shown(output) for output in cell["outputs"]]
        return found


def _shown(output: dict[str, Any]) -> nodes.Node:
    if output["output_type"] == "stream":
        return _text("".join(output["text"]))
    data = output["data"]
    if "image/png" in data:
        shown = f'<img alt="" src="data:image/png;base64,{html.escape(data["image/png"])}">'
    else:
        return _text("".join(data["text/plain"]))
    return nodes.raw("", f'<div class="cell-output">{shown}</div>', format="html")


def _text(text: str) -> nodes.Node:
    return nodes.literal_block(text, text, language="text", classes=["cell-output"])


def main() -> None:
    """Run every notebook and write it with its new outputs."""
    for path in NOTEBOOKS:
        whole = json.loads(path.read_text())
        whole["cells"] = played(path)
        path.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()

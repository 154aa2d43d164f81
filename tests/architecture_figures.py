"""Print figures of the architecture: files, floors, imports, and the central classes.

    python -m tests.architecture_figures                 # of this checkout
    python -m tests.architecture_figures ../before       # of another checkout, at any commit since 45ec958

Only reads the source. Type-only imports count, as in ``tests/test_architecture.py``.
"""

import ast
import sys
from graphlib import TopologicalSorter
from pathlib import Path


class House:
    """The package ``fairshard`` of the checkout in ``folder``, parsed."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.trees = {}
        for path in sorted((self.folder / "fairshard").rglob("*.py")):
            parts = path.relative_to(self.folder).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            self.trees[name] = ast.parse(path.read_text())
        self.graph = {name: set(self._imports(tree)) - {name} for name, tree in self.trees.items()}
        self.classes = {
            node.name: node for tree in self.trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
        }

    def _imports(self, tree):
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                full = [f"{node.module}.{alias.name}" for alias in node.names]
                names = [name if name in self.trees else node.module for name in full]
            else:
                continue
            yield from (name for name in names if name in self.trees)

    def floors(self):
        """The floors that the test of this checkout enforces, bottom up: prefixes of module names."""
        found = {}
        for node in ast.parse((self.folder / "tests" / "test_architecture.py").read_text()).body:
            if isinstance(node, ast.Assign):
                targets = {name.id for name in ast.walk(node.targets[0]) if isinstance(name, ast.Name)}
                if targets <= {"UTILS", "DATA_PARALLEL", "LAYERS", "FLOORS"}:
                    exec(ast.unparse(node), found)
        if "FLOORS" in found:
            return [[f"fairshard.{name}"] for name in found["FLOORS"]]
        return found["LAYERS"][::-1]

    def arrows_up(self):
        """``(importing, imported)`` of the imports that point to a higher floor."""
        floors = self.floors()

        def floor_of(name):
            fitting = {
                prefix: number
                for number, prefixes in enumerate(floors)
                for prefix in prefixes
                if name == prefix or name.startswith(f"{prefix}.")
            }
            return fitting[max(fitting, key=len)] if fitting else 0

        return [
            (name, other) for name, others in self.graph.items() for other in others if floor_of(other) > floor_of(name)
        ]

    def circles(self):
        """The sets of files that import each other, directly or through others."""
        reached = {}
        for start in self.graph:
            found, waiting = {start}, [start]
            while waiting:
                new = self.graph[waiting.pop()] - found
                found |= new
                waiting += new
            reached[start] = found
        together = {frozenset(b for b in reached[a] if a in reached[b]) for a in self.graph}
        return [circle for circle in together if len(circle) > 1]

    def longest_chain(self):
        """The longest chain of imports, each file imported by the one before; a circle is one link."""
        link = {name: (name,) for name in self.graph}
        for circle in self.circles():
            link |= dict.fromkeys(circle, tuple(sorted(circle)))
        below = {one: set() for one in link.values()}
        for name, others in self.graph.items():
            below[link[name]] |= {link[other] for other in others} - {link[name]}
        best = {}
        for one in TopologicalSorter(below).static_order():
            best[one] = [one, *max((best[other] for other in below[one]), key=len, default=[])]
        return max(best.values(), key=len)

    def shared_attributes(self, name):
        """The attributes of ``self`` that more than one method of class ``name`` assigns."""
        written = {}
        for method in self.classes[name].body:
            if isinstance(method, ast.FunctionDef):
                for node in ast.walk(method):
                    is_written = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
                    if is_written and ast.unparse(node.value) == "self":
                        written.setdefault(node.attr, set()).add(method.name)
        return {attribute: sorted(methods) for attribute, methods in sorted(written.items()) if len(methods) > 1}

    def depth(self, name):
        """Length of the chain of package classes that ``name`` inherits from, itself included."""
        bases = [base.id for base in self.classes[name].bases if isinstance(base, ast.Name)]
        return 1 + max((self.depth(base) for base in bases if base in self.classes), default=0)


def main(folder="."):
    """Print the figures of the checkout in ``folder``."""
    house = House(folder)
    chain = house.longest_chain()
    shared = house.shared_attributes("Unit")
    flat_params = [name for name in house.classes if name.endswith("FlatParam")]
    figures = {
        "files": len(house.trees),
        "floors": len(house.floors()),
        "imports that point up": len(house.arrows_up()),
        "circles of files": len(house.circles()),
        "links in the longest chain of imports": len(chain),
        "files in that chain": sum(map(len, chain)),
        "attributes of Unit that two methods write": len(shared),
        "classes that a flat param is deep": max(map(house.depth, flat_params)),
    }
    for what, number in figures.items():
        print(f"{what:43}{number:4}")
    print("\nThe longest chain:", *(" = ".join(one) for one in chain), sep="\n  ")
    print("\nThe attributes:", *(f"{name}: {', '.join(methods)}" for name, methods in shared.items()), sep="\n  ")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The figures that `tests/kit/gauge.py` counts are those of the definitions in its docstrings."""

import textwrap

import pytest

from tests.kit.gauge import Figures, Package


def package(folder, **files):
    """A package of modules: ``{"a__b": source}`` is the file ``a/b.py``."""
    root = folder / "house"
    for name, source in files.items():
        path = root / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
    for path in [root, *(path for path in root.rglob("*") if path.is_dir())]:
        (path / "__init__.py").touch()
    return Package(root)


def figures_of(folder, source):
    """The figures of one file."""
    found = package(folder, file=source)
    return found.figures(["house.file"])


def test_statements_are_counted_and_docstrings_are_not(tmp_path):
    """A function, its return and an assignment are three statements, on however many lines."""
    source = '''
        """Words."""
        a = 1; b = (
            2
        )

        def f():
            """More words."""
            return a
    '''
    assert figures_of(tmp_path, source) == Figures(statements=4)


def test_a_condition_counts_however_it_is_written(tmp_path):
    """``if``, ``while``, ``for``, ``except``, a case, a conditional expression, ``and``, a comprehension."""
    written = {
        "if a: pass": 1,
        "while a: pass": 1,
        "for i in a: pass": 1,
        "try: pass\nexcept ValueError: pass": 1,
        "match a:\n    case 1: pass\n    case _: pass": 2,
        "b = 1 if a else 2": 1,
        "b = a and c and d": 2,
        "b = [i for i in a if i]": 2,
        "b = a": 0,
    }
    for number, (source, expected) in enumerate(written.items()):
        assert figures_of(tmp_path / str(number), source).branches == expected, source


def test_attributes_of_two_methods_are_shared(tmp_path):
    """What one method writes twice is not shared; a tuple and an increment are assignments; classes do not mix."""
    source = """
        class A:
            def __init__(self):
                self.once, self.twice = 1, 2
                self.once = 3
                self.grows = 0

            def change(self):
                self.twice = 4
                self.grows += 1

        class B:
            def change(self):
                self.once = 1
    """
    assert figures_of(tmp_path, source).shared == 2


def test_flags_are_known_by_value_type_and_name(tmp_path):
    """``True`` in one assignment, a field of type bool, and a name that begins with ``is_`` are a flag each."""
    source = """
        class A:
            plain: int
            typed: bool

            def __init__(self, given):
                self.on = True
                self.on = given
                self._is_open = given
                self.isolated = given
    """
    assert figures_of(tmp_path, source).flags == 3


def test_assignments_to_other_packages_are_patches(tmp_path):
    """Attributes of what is imported from elsewhere, by assignment or `setattr`; not of the package's own."""
    source = """
        import torch
        from torch.nn import Module
        from house import other

        torch.add = None
        Module.forward.__doc__ = None
        setattr(Module, "forward", None)
        other.name = None
        own = None
    """
    assert figures_of(tmp_path, source).patches == 3


def test_imports_are_followed(tmp_path):
    """Relative imports, submodules and imports in functions are reached; what imports the start is not."""
    found = package(
        tmp_path,
        start="from house.room import near\nfrom . import plain\nimport os",
        room__near="def f():\n    from .far import name",
        room__far="name = 1",
        plain="",
        above="import house.start",
    )
    expected = ["house", "house.plain", "house.room", "house.room.far", "house.room.near", "house.start"]
    assert found.reached_from("house.start") == expected
    with pytest.raises(ValueError, match="must be a module of house"):
        found.reached_from("house.nothing")


def test_figures_above_their_limits_are_named():
    """Equal and smaller figures are within the limits."""
    limits = Figures(statements=3, branches=2, flags=1)
    assert Figures(statements=3, branches=1, flags=1).above(limits) == {}
    assert Figures(statements=4, patches=1).above(limits) == {"statements": (4, 3), "patches": (1, 0)}

"""The reference has every public name once, no internal one, every error, and the drawings of their script."""

import copy
import inspect
import pickle
import pydoc
import re
import sys
import traceback
from dataclasses import fields
from pathlib import Path

import pytest

import fairshard.errors
from fairshard.settings.config import Options

DOCS = Path(__file__).parents[1] / "docs"
sys.path.insert(0, str(DOCS))

import api_pages  # noqa: E402
import drawings  # noqa: E402


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The text of each page of the API."""
    folder = tmp_path_factory.mktemp("api")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api_pages, "FOLDER", folder)
        api_pages.write()
    return {path.stem: path.read_text() for path in folder.glob("*.md")}


def documented(pages):
    """The names that have an entry, with their modules, in all pages."""
    kinds = "autoclass|autofunction|py:data|py:function"
    return re.findall(rf"^\.\. (?:{kinds}):: ([\w.]+)", "\n".join(pages.values()), re.M)


def test_every_public_name_is_documented_once(pages):
    """Each object in the `__all__` of a public module has one entry, whatever number of names it has."""
    found = documented(pages)
    assert len(found) == len(set(found))
    modules = api_pages.modules()
    values = [getattr(modules[module], name) for module, _, name in (path.rpartition(".") for path in found)]
    for module in modules.values():
        for name in api_pages.public_names(module):
            value = getattr(module, name)
            if not inspect.ismodule(value) and getattr(value, "__module__", None) != "fairshard.errors":
                assert sum(value is other for other in values) == 1, f"{module.__name__}.{name}"


def test_no_internal_name_is_documented(pages):
    """Each entry is in the `__all__` of its module, or in the list of the modules without one."""
    modules = api_pages.modules()
    for path in documented(pages):
        module, _, name = path.rpartition(".")
        assert name in api_pages.public_names(modules[module]), path
    lines = re.findall(r":members: (.*)", "\n".join(pages.values()))
    assert {name for line in lines for name in line.split(", ") if name.startswith("_")} <= {"_HYBRID_SHARD_ZERO2"}


def test_what_a_package_offers_has_a_page():
    """Every package and module of fairshard with an `__all__` is public and has a page, or only serves another one."""
    package = Path(fairshard.errors.__file__).parent
    serving = {"fairshard.nn.data_parallel", "fairshard.errors"}
    for path in package.rglob("*.py"):
        if re.search(r"^__all__ = ", path.read_text(), re.M):
            parts = path.relative_to(package.parent).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            assert name in {*serving, *api_pages.modules()}, f"{name} has an `__all__` and no page in docs/api_pages.py"


def test_inherited_methods_are_there(pages):
    """The methods of a class that its base classes define are on its page too."""
    (members,) = re.findall(r"autoclass:: fairshard\.nn\.FullyShardedDataParallel\n   :members: (.*)", pages["wrapper"])
    assert {"clip_grad_norm_", "no_sync", "full_optim_state_dict", "join"} <= set(members.split(", "))


def test_internal_members_are_there_at_all():
    """The list of members to leave out names members that exist."""
    for name, members in api_pages.INTERNAL.items():
        (entry,) = [entry for page in api_pages.entries().values() for entry in page if entry.name == name] or [None]
        if entry is not None and inspect.isclass(entry.value):
            assert all(hasattr(entry.value, member) for member in members), name


def test_every_error_says_its_cause_and_cure():
    """The docstring of each class of `fairshard.errors` is a sentence with the cause, then the cure."""
    for name, cls in vars(fairshard.errors).items():
        if inspect.isclass(cls) and cls is not fairshard.errors.FairshardError:
            cause, _, cure = cls.__doc__.partition("\n\n    Cure: ")
            assert cause.endswith("."), name
            assert "\n" not in cause, name
            assert cure.strip().endswith("."), name


def test_a_traceback_names_the_docstring_of_the_error():
    """A note below the message names the class, in copies too; a message that quotes another has no second one."""
    errors = [error for error in vars(fairshard.errors).values() if inspect.isclass(error)]
    assert len(errors) > 15

    class Own(fairshard.errors.CheckpointError):
        """A user's own class."""

    for kind in (*errors, Own):
        error = kind("what is wrong")
        assert str(error) == "what is wrong"
        (note,) = error.__notes__
        known = fairshard.errors.CheckpointError if kind is Own else kind
        assert pydoc.locate(note.rpartition(" pydoc ")[2]) is known
        copies = [copy.copy(error)] if kind is Own else [copy.copy(error), pickle.loads(pickle.dumps(error))]
        assert all(other.__notes__ == [note] and other.args == error.args for other in copies)
        if sys.version_info >= (3, 11):
            printed = "".join(traceback.format_exception(fairshard.errors.FairshardError(f"quoted: {error}")))
            last = "Cause and cure: python -m pydoc fairshard.errors.FairshardError\n"
            assert printed.endswith(f"quoted: what is wrong\n{last}")


@pytest.mark.parametrize("draw", drawings.PICTURES, ids=lambda draw: draw.__name__)
def test_drawings_are_those_of_the_script(draw):
    """`python docs/drawings.py` would change nothing, and every drawing is on a page."""
    picture = draw()
    assert (drawings.STATIC / f"{picture.name}.svg").read_text() == picture.svg()
    pages = "".join(page.read_text() for page in DOCS.rglob("*.md") if "_build" not in page.parts)
    assert f"{{drawing}} {picture.name}\n" in pages


def test_messages_on_the_page_of_errors_are_in_the_source():
    """The first words of each message in the tables are those of a message in the package."""
    text = (DOCS / "reference" / "errors.md").read_text()
    quoted = re.findall(r"^\| (.*?) \.\.\. \|", text, re.M)
    assert len(quoted) > 10
    package = Path(fairshard.errors.__file__).parent
    source = "".join(path.read_text() for path in package.rglob("*.py"))
    joined = re.sub(r'"\s*f?"', "", source)
    checks = [(field.name, check) for field in fields(Options) for check in field.metadata.get("checks", ())]
    joined += "".join(f"`{name}` must be {check.words}" for name, check in checks)
    for words in quoted:
        assert words.partition("=...")[0] in joined, words


# Files of other projects that the docs name.
OF_OTHERS = {"zero_to_fp32.py", "torchtitan/train.py", "test/distributed/_composable/fsdp/test_fully_shard_comm.py"}


def test_files_and_tests_that_the_docs_name_exist():
    """Each Python file in backticks is one of this repository, and each test has a function of its name."""
    root = DOCS.parent
    files = [path for folder in ("fairshard", "tests", "benchmarks", "docs") for path in root.glob(f"{folder}/**/*.py")]
    paths = {f"/{path.relative_to(root).as_posix()}" for path in files}
    tests = "".join(path.read_text() for path in files if path.is_relative_to(root / "tests"))
    pages = [page for page in DOCS.rglob("*.md") if "_build" not in page.parts and "changelog.d" not in page.parts]
    for page in [*pages, *root.glob("*.md")]:
        for path, test in re.findall(r"`((?:\w+/)*\w+\.py)?(?:\.\.\.)?(?:::(\w+))?`", page.read_text()):
            known = not path or path in OF_OTHERS or any(name.endswith(f"/{path}") for name in paths)
            assert known, f"{page.name} names {path}"
            assert f"def {test}" in tests, f"{page.name} names {path}::{test}"

"""The changelog is of this version, and kind to read."""

import re
from pathlib import Path

import fairshard

ROOT = Path(__file__).parents[1]
FRAGMENTS = ROOT / "docs" / "changelog.d"
VERSION = re.compile(r"## (\d+\.\d+\.\d+) \((\d{4}-\d\d-\d\d)\)")


def lines():
    return [line for line in (ROOT / "CHANGELOG.md").read_text().splitlines()[3:] if line]


def test_versions_fall_and_begin_with_this_one():
    """The newest version is the package's, and versions and dates fall."""
    found = [VERSION.fullmatch(line).groups() for line in lines() if line.startswith("## ")]
    assert found[0][0] == fairshard.__version__
    assert found == sorted(found, reverse=True)
    assert len(found) == len(dict(found))


def test_every_change_is_one_line_in_a_group():
    """Each line is a version, one of three groups, or one change; groups keep their order and are not empty."""
    groups = ["### Added", "### Changed", "### Fixed"]
    for version in re.split(r"^## .*$", "\n".join(lines()), flags=re.MULTILINE)[1:]:
        found = version.strip().split("\n")
        headings = [line for line in found if line.startswith("#")]
        assert headings == [group for group in groups if group in headings]
        assert all(line in groups or re.fullmatch(r"- .{10,118}\.", line) for line in found), found
        assert not any(a in groups and b in groups for a, b in zip(found, [*found[1:], groups[0]], strict=True))


def test_fragments_have_the_name_of_an_issue():
    """What waits for the next release is ``<issue>.<what>.md``."""
    names = {path.name for path in FRAGMENTS.iterdir()} - {"README.md"}
    assert all(re.fullmatch(r"\d+\.[a-z0-9.-]+\.md", name) for name in names), names

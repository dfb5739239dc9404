"""Commands in the documents run as they stand, from a clone's root."""

import re

import pytest
from places import REPOSITORY

PAGES = sorted([REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_name_their_interpreter_and_install_this_clone(page):
    for line in page.read_text().splitlines():
        assert not re.match(r"\s*scripts/\w+\.py ", line), "scripts are run as python scripts/..."
        assert "pip install 'hybridkv" not in line, "the name is not published"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_scripts_that_are_named_exist(page):
    for name in re.findall(r"scripts/\w+\.py", page.read_text()):
        assert (REPOSITORY / name).is_file(), name

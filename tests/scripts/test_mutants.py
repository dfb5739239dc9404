"""Mutants do not rot: what they replace stands in the source, and their tests exist."""

import sys

import pytest
from places import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts"))

import mutants

from hybridkv.errors import UserError


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda m: m.name)
def test_a_mutant_changes_its_file_in_one_place(mutant):
    text = (REPOSITORY / mutant.file).read_text()
    assert mutants.seeded(mutant, text) != text
    for test in mutant.tests:
        file, _, function = test.partition("::")
        assert f"def {function}" in (REPOSITORY / file).read_text()


def test_there_are_enough_and_each_has_its_own_name():
    names = [mutant.name for mutant in mutants.MUTANTS]
    assert len(names) == len(set(names)) >= 24


def test_text_that_moved_on_is_said():
    with pytest.raises(UserError, match="the source moved on"):
        mutants.seeded(mutants.MUTANTS[0], "nothing of it")

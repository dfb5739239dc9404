"""The page about field scenarios says what the tests here do."""

import collections
import pathlib
import re

import pytest

HERE = pathlib.Path(__file__).parent
ROW = re.compile(
    r"\| (B\d{3}) \| ([^|]+) \| (covered|planned|impossible here) \| ([^|]+) \| ([^|]+) \|"
)
ROWS = 176


@pytest.fixture(scope="module")
def page(repository):
    return (repository / "docs" / "scenarios.md").read_text()


@pytest.fixture(scope="module")
def rows(page):
    return [ROW.fullmatch(line).groups() for line in page.splitlines() if line.startswith("| B")]


def files_by_id():
    """Id to the files that have a test of it."""
    files = collections.defaultdict(set)
    for file in HERE.glob("test_*.py"):
        for names in re.findall(r"^def test((?:_b\d{3})+)_", file.read_text(), re.MULTILINE):
            for number in re.findall(r"\d{3}", names):
                files[f"B{number}"].add(file.name)
    return files


def test_every_row_has_an_id_of_its_own(rows):
    ids = [row[0] for row in rows]
    assert ids == sorted(set(ids))
    assert len(ids) == ROWS


def test_covered_rows_are_those_that_have_a_test_and_name_its_file(rows):
    named = {row[0]: set(re.findall(r"`(\w+\.py)`", row[3])) for row in rows if row[2] == "covered"}
    assert named == files_by_id()


def test_the_counts_are_those_of_the_rows(page, rows):
    count = collections.Counter(row[2] for row in rows)
    for status in ("covered", "planned", "impossible here"):
        assert f"\n| {status} | {count[status]} |\n" in page
    assert f"\n| all | {len(rows)} |\n" in page


def test_every_row_says_where_it_comes_from(rows):
    for row in rows:
        assert re.search(r"\[[\w.-]+/[\w.-]+[#@]\w+\]\(https://github\.com/", row[4]), row[0]

"""Two engines and a router: a request goes where its prefix can be resumed."""

import json
import sys

import pytest
from engines import Time, make_engine
from places import REPOSITORY
from toy import toy_options, toy_runtime

sys.path.insert(0, str(REPOSITORY / "scripts"))

import command_line
import route_events

from hybridkv.errors import UserError


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Both engines in this process, as small as those of other tests, and so compiled before."""
    path = tmp_path_factory.mktemp("route") / "rows.json"

    def engine(tiers):
        assert tiers is None
        options = toy_options(tile=16, key_block=8, index_block=16, lanes=2)
        return make_engine(toy_runtime(), options, time=Time())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(route_events, "_engine", engine)
        patch.setattr(command_line, "use_compilation_cache", lambda: None)
        code = route_events.main(["--threads", "--documents", "2", "--json", str(path)])
    assert code == 0
    return json.loads(path.read_text())


def test_the_shorter_match_wins_where_it_computes_less(rows):
    prepared = rows[0]
    assert prepared["match A"] > prepared["match B"]
    assert prepared["reuse A"] < prepared["reuse B"]
    assert prepared["longest"] == "A"
    assert prepared["sent to"] == "B"
    assert prepared["reused"] == prepared["promised"] == prepared["reuse B"]


def test_what_events_promise_is_what_engines_reuse(rows):
    assert [row["promised"] for row in rows] == [row["reused"] for row in rows]
    assert sum(row["reused"] > 0 for row in rows) >= 5


def test_new_documents_are_spread_and_old_ones_go_back(rows):
    first, again = rows[1:3], rows[3:]
    assert {row["sent to"] for row in first} == {"A", "B"}
    home = {row["request"].partition(",")[0]: row["sent to"] for row in first}
    for row in again:
        assert row["sent to"] == home[row["request"].partition(",")[0]]
        assert row["reused"] >= 96


def test_no_documents_are_refused():
    with pytest.raises(UserError, match="at least 1"):
        route_events.parse(["--documents", "0"])

"""Outputs end where they must, and no character of a stop string is ever shown."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv.engine.stops import Emit, StopMatcher, StopReason
from hybridkv.errors import UserError


def feed(matcher: StopMatcher, *pieces: str) -> list[str]:
    """What is shown after each piece."""
    return [matcher.feed_token(7, piece).text for piece in pieces]


def test_text_without_stops_passes_at_once():
    matcher = StopMatcher()
    assert matcher.feed_token(1, "hello") == Emit(text="hello")
    assert matcher.feed_token(2) == Emit(text="")
    assert (matcher.held, matcher.flush(), matcher.stopped) == ("", "", False)


def test_a_stop_token_ends_the_output_without_its_own_text():
    matcher = StopMatcher(frozenset({2, 5}))
    assert matcher.feed_token(3, "a") == Emit(text="a")
    end = matcher.feed_token(5, "</s>")
    assert end == Emit(text="", stopped=True, reason=StopReason.TOKEN, matched=5)
    assert matcher.stopped


def test_token_ids_alone_are_enough():
    matcher = StopMatcher(frozenset({5}), ("never",))
    assert [matcher.feed_token(token).stopped for token in (1, 2, 5)] == [False, False, True]


def test_a_stop_string_in_one_token_hides_what_follows():
    matcher = StopMatcher(stop_strings=("END",))
    end = matcher.feed_token(1, "some text END and more")
    assert end == Emit(text="some text ", stopped=True, reason=StopReason.STRING, matched="END")
    assert matcher.flush() == ""


def test_a_stop_string_over_several_tokens_is_held_back_and_found():
    matcher = StopMatcher(stop_strings=("\n\nUser:",))
    assert feed(matcher, "Hi.", "\n", "\n", "Us") == ["Hi.", "", "", ""]
    assert matcher.held == "\n\nUs"
    end = matcher.feed_token(9, "er: next")
    assert (end.text, end.stopped, end.matched) == ("", True, "\n\nUser:")


def test_held_text_is_shown_when_it_turns_out_to_be_no_stop():
    matcher = StopMatcher(stop_strings=("abc",))
    assert feed(matcher, "xa", "b", "d", "ab", "ab", "c") == ["x", "", "abd", "", "ab", ""]
    assert matcher.stopped


def test_a_shorter_beginning_stays_held_when_a_longer_one_fails():
    matcher = StopMatcher(stop_strings=("aab",))
    assert feed(matcher, "a", "a", "a", "a", "b") == ["", "", "a", "a", ""]
    assert matcher.stopped


def test_flush_gives_held_text_once():
    matcher = StopMatcher(stop_strings=("stop",))
    assert feed(matcher, "a st") == ["a "]
    assert (matcher.flush(), matcher.flush()) == ("st", "")


def test_a_stop_token_lets_held_text_out():
    matcher = StopMatcher(frozenset({0}), ("stop",))
    assert feed(matcher, "a st") == ["a "]
    assert matcher.feed_token(0, "op").text == "st"


@pytest.mark.parametrize(
    ("stops", "text", "shown", "matched"),
    [
        (("bcd", "c"), "abcd", "ab", "c"),  # c is whole first
        (("c", "bc", "abc"), "xabc", "x", "abc"),  # all end together: the longest
        (("ab", "abc"), "abc", "", "ab"),  # ab is whole first
        (("world", "lo wo"), "hello world", "hel", "lo wo"),
    ],
)
def test_the_first_end_counts_and_then_the_longest(stops, text, shown, matched):
    for order in (stops, stops[::-1]):
        for pieces in ([text], list(text)):
            matcher = StopMatcher(stop_strings=order)
            assert run(matcher, pieces) == (shown, matched)


def test_nothing_may_follow_the_end():
    matcher = StopMatcher(frozenset({4}))
    matcher.feed_token(4)
    with pytest.raises(RuntimeError, match="token 6 came after the output had stopped"):
        matcher.feed_token(6, "x")


@pytest.mark.parametrize(
    ("tokens", "strings", "message"),
    [
        ((), ("a", ""), "a stop string must not be empty"),
        ((), "END", r"stop strings must be a list of texts: pass \('END',\)"),
        ((), (b"x",), "a stop string must be a text, got b'x'"),
        ((-1,), (), "a stop token must be a token id, at least 0, got -1"),
        ((True,), (), "a stop token must be a token id"),
        ((1.5,), (), "a stop token must be a token id"),
    ],
)
def test_stops_that_make_no_sense_are_refused_in_one_line(tokens, strings, message):
    with pytest.raises(UserError, match=message) as error:
        StopMatcher(frozenset(tokens), strings)
    assert "\n" not in str(error.value)


def run(matcher: StopMatcher, pieces: list[str]) -> tuple[str, int | str | None]:
    """All that is shown, and what ended it."""
    shown = ""
    for piece in pieces:
        emit = matcher.feed_token(1, piece)
        shown += emit.text
        if emit.stopped:
            return shown, emit.matched
        assert len(matcher.held) < max((len(s) for s in matcher.stop_strings), default=1)
    return shown + matcher.flush(), None


def naive(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """Character by character over the whole text."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            stop = max(done, key=len)
            return text[: end - len(stop)], stop
    return text, None


letters = st.text(alphabet="ab", max_size=5)


@settings(max_examples=600, deadline=None, derandomize=True)
@given(
    pieces=st.lists(letters, max_size=12),
    stops=st.lists(st.text(alphabet="ab", min_size=2, max_size=6), max_size=4).map(tuple),
)
def test_any_cut_into_tokens_shows_what_a_search_over_the_whole_text_shows(pieces, stops):
    assert run(StopMatcher(stop_strings=stops), pieces) == naive("".join(pieces), stops)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    pieces=st.lists(letters, max_size=12),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=6), max_size=4).map(tuple),
)
def test_nothing_is_held_that_could_not_begin_a_stop_string(pieces, stops):
    matcher = StopMatcher(stop_strings=stops)
    for piece in pieces:
        if matcher.feed_token(1, piece).stopped:
            return
        held = matcher.held
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)

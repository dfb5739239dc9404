"""A log of one's own service becomes a trace without its tokens."""

import json

import pytest

from hybridkv.replay.record import record
from hybridkv.replay.trace import BLOCK, TraceError, read_trace


def write(path, *rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_token_ids_become_shared_blocks(tmp_path):
    shared = [90001 + n for n in range(BLOCK)]
    log = write(
        tmp_path / "log.jsonl",
        {"timestamp": 20.5, "tokens": [*shared, 5, 6], "output_length": 7},
        {"timestamp": 10, "tokens": [*shared, 5], "output_length": 0},
        {"timestamp": 30, "tokens": [*shared, 5], "output_length": 1, "namespace": "b"},
    )
    out = tmp_path / "trace.jsonl.gz"
    made = record(log, out)
    assert (made.requests, made.skipped) == (3, ())
    trace = read_trace(out)
    assert trace.arrival.tolist() == [0.0, 10.5, 20.0]
    assert trace.prompt.tolist() == [513, 514, 513]
    first, second, foreign = (trace.of(n).tolist() for n in range(3))
    assert first[0] == second[0]
    assert first[1] != second[1]
    assert not set(foreign) & {*first, *second}


def test_nothing_of_tokens_or_hashes_is_in_the_trace(tmp_path):
    log = write(
        tmp_path / "log.jsonl",
        {"timestamp": 1, "tokens": [777777] * 600, "output_length": 2},
        {
            "timestamp": "2026-11-30T08:00:00",
            "hashes": ["secret-a", "secret-b"],
            "input_length": 600,
            "output_length": 2,
        },
    )
    out = tmp_path / "trace.jsonl"
    record(log, out)
    text = out.read_text()
    assert "777777" not in text
    assert "secret" not in text
    rows = [json.loads(line) for line in text.splitlines()]
    assert [row["hash_ids"] for row in rows] == [[0, 1], [2, 3]]
    assert set(rows[0]) == {"timestamp", "input_length", "output_length", "hash_ids"}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{", "not JSON"),
        ({"tokens": [1], "output_length": 1}, "timestamp is missing"),
        ({"timestamp": "noon", "tokens": [1], "output_length": 1}, "not a date and time"),
        ({"timestamp": 1, "tokens": [], "output_length": 1}, "no list of token ids"),
        ({"timestamp": 1, "tokens": [1.5], "output_length": 1}, "no integer"),
        ({"timestamp": 1, "tokens": [-1], "output_length": 1}, "tokens: token -1"),
        ({"timestamp": 1, "tokens": [2**70], "output_length": 1}, "tokens:"),
        (
            {"timestamp": 1, "tokens": [1], "input_length": 2, "output_length": 1},
            "but tokens are 1",
        ),
        ({"timestamp": 1, "output_length": 1}, "neither tokens nor"),
        ({"timestamp": 1, "hashes": ["a"], "input_length": 600, "output_length": 1}, "2 blocks"),
        ({"timestamp": 1, "hashes": ["a", "a"], "input_length": 600, "output_length": 1}, "twice"),
        (
            {"timestamp": 1, "hashes": [["a"]], "input_length": 6, "output_length": 1},
            "neither text",
        ),
        (
            {"timestamp": 1, "hashes": ["q", "p"], "input_length": 600, "output_length": 1},
            "chained",
        ),
        ({"timestamp": 1, "tokens": [1], "output_length": 1, "namespace": 3}, "namespace"),
    ],
)
def test_a_malformed_line_is_named_and_the_rest_recorded(tmp_path, row, words):
    good = {"timestamp": 1, "hashes": ["p", "q"], "input_length": 600, "output_length": 1}
    made = record(write(tmp_path / "log.jsonl", good, row), tmp_path / "trace.jsonl")
    assert made.requests == 1
    (skipped,) = made.skipped
    assert skipped.line == 2
    assert words in skipped.reason


def test_a_log_without_a_request_is_refused(tmp_path):
    with pytest.raises(TraceError, match="1 lines skipped; line 1"):
        record(write(tmp_path / "log.jsonl", "x"), tmp_path / "trace.jsonl")

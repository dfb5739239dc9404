"""Reading traces: what counts, and what is said of lines that are none."""

import gzip
import json
import lzma

import numpy as np
import pytest

from hybridkv.replay.trace import BLOCK, TraceError, read_trace


def line(timestamp, tokens, ids, output=5):
    return json.dumps(
        {
            "timestamp": timestamp,
            "input_length": tokens,
            "output_length": output,
            "hash_ids": ids,
        }
    )


@pytest.fixture
def write(tmp_path):
    def write(text, name="trace.jsonl"):
        path = tmp_path / name
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return write


def test_requests_are_in_order_of_arrival_and_share_block_numbers(write):
    rows = [line(3000, 2 * BLOCK, [7, 9]), line(1000, BLOCK + 1, [7, 8], output=0)]
    trace = read_trace(write("\n".join(rows)))
    assert trace.arrival.tolist() == [0.0, 2.0]
    assert trace.prompt.tolist() == [BLOCK + 1, 2 * BLOCK]
    assert trace.output.tolist() == [0, 5]
    first, second = trace.of(0), trace.of(1)
    assert first[0] == second[0]
    assert len({*first.tolist(), *second.tolist()}) == trace.distinct == 3
    assert trace.shares
    assert trace.skipped == ()


@pytest.mark.parametrize(
    ("pack", "name"), [(gzip.compress, "t.jsonl.gz"), (lzma.compress, "t.jsonl.xz")]
)
def test_compressed_traces_are_read_and_cut_ones_refused(write, pack, name):
    whole = pack("\n".join([line(n, 600, [n, n + 1000]) for n in range(200)]).encode())
    assert len(read_trace(write(whole, name))) == 200
    with pytest.raises(TraceError, match="cannot read the trace"):
        read_trace(write(whole[: len(whole) // 2], name))


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("", "empty"),
        ("{", "not JSON"),
        ("[1]", "not a JSON object"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 1}', "hash_ids is missing"),
        ('{"input_length": 5, "output_length": 1, "hash_ids": [1]}', "timestamp is missing"),
        (line(-1, 5, [1]), "timestamp is -1"),
        (line(float("nan"), 5, [1]), "timestamp is nan"),
        (line(1, 0, []), "input_length is 0"),
        (line(1, True, [1]), "input_length is True"),
        (line(1, 2**31, [1]), "input_length is 2147483648"),
        (line(1, 5, [1], output=1.5), "output_length is 1.5"),
        (line(1, 600, [1]), "600 tokens are 2 blocks of 512, hash_ids has 1"),
        (line(1, 600, [1, "2"]), "hash_ids holds '2'"),
        (line(1, 600, [1, -2]), "hash_ids holds -2"),
        (line(1, 600, [5, 5]), "stands twice"),
        (line(1, 600, [2, 1]), "hash id 1 stands behind 2 here and stood first before"),
        (b"\xff\xfe", "not UTF-8"),
    ],
)
def test_a_malformed_line_is_named_with_its_number_and_the_rest_replayed(write, bad, words):
    good = [line(1, 600, [1, 3]), line(2, 600, [1, 4])]
    raw = bad if isinstance(bad, bytes) else bad.encode()
    trace = read_trace(write(b"\n".join([good[0].encode(), raw, good[1].encode()])))
    assert len(trace) == 2
    (skipped,) = trace.skipped
    assert skipped.line == 2
    assert words in skipped.reason
    assert trace.lines == 3


def test_ids_of_a_line_that_was_skipped_are_not_known(write):
    rows = [line(1, 600, [1, 2]), line(2, 1200, [8, 9, 2]), line(3, 600, [9, 8])]
    trace = read_trace(write("\n".join(rows)))
    assert [each.line for each in trace.skipped] == [2]
    assert trace.distinct == 4


def test_a_file_without_a_request_is_refused_in_one_line(write, tmp_path):
    for path in (write("no\nrequests"), tmp_path / "missing.jsonl"):
        with pytest.raises(TraceError) as caught:
            read_trace(path)
        assert "\n" not in str(caught.value)
    with pytest.raises(TraceError, match=r"2 lines skipped; line 1: not JSON"):
        read_trace(write("no\nrequests"))


def test_a_csv_without_prefixes_shares_no_block(write):
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        "2023-11-16 18:17:03.9799600,1100,10\r\n"
        "2023-11-16 18:17:05.9799600,512,3\r\n"
        "later,512,3\r\n"
        "2023-11-16 18:17:06,many,3\r\n"
        "2023-11-16 18:17:06,5\r\n"
    )
    trace = read_trace(write(text, "azure.csv"))
    assert trace.arrival.tolist() == [0.0, 2.0]
    assert np.unique(trace.blocks).size == len(trace.blocks) == 4
    assert not trace.shares
    assert [(each.line, each.reason.split(",")[0]) for each in trace.skipped] == [
        (4, "TIMESTAMP is 'later'"),
        (5, "ContextTokens is 'many'"),
        (6, "2 fields"),
    ]


def test_a_part_of_a_trace_keeps_its_blocks(write):
    rows = [line(n, 600, [0, n + 1]) for n in range(3)]
    trace = read_trace(write("\n".join(rows)))
    assert trace.first(2).blocks.tolist() == [0, 1, 0, 2]
    kept = trace.only(np.array([True, False, True]))
    assert kept.of(1).tolist() == [0, 3]
    assert kept.arrival.tolist() == [0.0, 0.002]

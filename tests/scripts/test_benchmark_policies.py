"""The snapshot-policy model against figures computed apart from it, and by hand."""

import dataclasses
import gzip
import json
import sys

import numpy as np
import pytest
from places import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts"))

import benchmark_policies
import policy_model
from benchmark_policies import FOLDER, TRACES, world_of
from policy_model import BLOCK, Prompt, figures, read_trace, simulate

from hybridkv.errors import UserError
from hybridkv.prefixes.policy import DEFAULT, DENSE, ENDS, GEOMETRIC, NEVER, THINNED

WORLD = world_of(7e9, 9600.0)


def prompt(*blocks, extra=1):
    return Prompt(tokens=BLOCK * len(blocks) + extra, blocks=np.array(blocks, np.int64))


# Ideal share of all prompt tokens; restored share of it with ends, and with ends and forks.
KNOWN = {
    "conversation": (0.373, 0.937, 0.960),
    "synthetic": (0.650, 0.782, 0.895),
    "agent": (0.962, 0.998, 0.998),
}


@pytest.mark.parametrize("name", KNOWN)
def test_the_traces_figures_are_those_of_another_simulator(name):
    prompts = read_trace(FOLDER / f"{TRACES[name]}.jsonl.gz")
    world = dataclasses.replace(WORLD, replay=False)
    ideal, *shares = KNOWN[name]
    for policy, share in zip((ENDS, DEFAULT), shares, strict=True):
        sums, shelf = simulate(prompts, policy, world)
        assert sums.ideal / sums.prompt == pytest.approx(ideal, abs=5e-4)
        assert figures(sums, shelf)["restored_share"] == pytest.approx(share, abs=1e-3)


def test_full_costs_nothing_more_than_itself_and_a_snapshot_a_block():
    prompts = [prompt(0, 1, 2), prompt(0, 1, 3), prompt(0, 4), prompt(0, 1, 2, 5)]
    row = figures(*simulate(prompts, DENSE, WORLD))
    assert row["restore_ratio"] == row["first_token_ratio"] == row["restored_share"] == 1.0
    a_block = BLOCK * 3514.25 + 3_644_416
    assert row["gb_per_million"] == pytest.approx(a_block / BLOCK / 1e3)


def test_a_fork_without_a_snapshot_is_paid_by_the_second_and_not_by_the_third():
    long = list(range(40))
    prompts = [prompt(*long), prompt(*long[:30], 50), prompt(*long[:30], 60)]
    sums, shelf = simulate(prompts, DEFAULT, WORLD)
    # The second replays 5,461 tokens, rounded down to a tile; the third finds what that wrote.
    assert sums.ideal - sums.reused == 11 * BLOCK
    assert sums.full_restore == pytest.approx(2 * WORLD.load(30 * BLOCK, state=True))
    again = 11 * WORLD.cost.tile_seconds + WORLD.load(30 * BLOCK, state=False)
    assert sums.restore == pytest.approx(again + WORLD.load(30 * BLOCK, state=True))
    assert shelf.snapshots == 4


def test_nothing_is_written_within_a_replay():
    long = list(range(200))
    sums, shelf = simulate([prompt(*long), prompt(*long[:130], 300)], GEOMETRIC, WORLD)
    assert sums.ideal - sums.reused == 11 * BLOCK
    assert not shelf.has_state[75:129].any()
    assert shelf.has_state[[129, 300]].all()


def test_computing_from_nothing_is_chosen_where_loading_is_slower():
    slow = world_of(1e6, 9600.0)
    sums, _ = simulate([prompt(0, 1), prompt(0, 1, 2)], DEFAULT, slow)
    assert sums.reused == 0
    assert sums.restore == sums.full_restore == pytest.approx(2 * slow.cost.tile_seconds)


def test_a_whole_prompt_asked_again_leaves_one_tile_to_compute():
    sums, _ = simulate([prompt(0, 1, extra=0)] * 2, DEFAULT, WORLD)
    assert (sums.ideal, sums.reused) == (BLOCK, BLOCK)


def test_thinning_drops_passed_ends_but_not_those_at_which_prompts_parted():
    line = list(range(64))
    grown = [prompt(*line[:n]) for n in range(1, 65)]
    _, shelf = simulate(grown, THINNED, WORLD)
    assert shelf.snapshots < 10
    assert not shelf.has_state[40]
    _, shelf = simulate([*grown[:41], prompt(*line[:41], 99), *grown[41:]], THINNED, WORLD)
    assert shelf.has_state[40]


def test_a_cap_holds_throughout_and_guesses_go_first():
    prompts = [prompt(*range(30 * n, 30 * n + 30)) for n in range(40)]
    capped = dataclasses.replace(WORLD, gigabytes=3.9)
    sums, shelf = simulate(prompts, GEOMETRIC, capped)
    assert sums.peak <= 3.9
    assert shelf.has_state[[30 * n + 29 for n in range(40)]].all()
    assert 0 < len(shelf.guessed) < sums.snapshots_written - 40


def test_without_snapshots_every_hit_replays():
    sums, shelf = simulate([prompt(*range(20)), prompt(*range(20), 30)], NEVER, WORLD)
    assert shelf.snapshots == 0
    assert sums.ideal - sums.reused == 11 * BLOCK


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"input_length": 600}',
        '{"input_length": 600, "hash_ids": [1]}',
        '{"input_length": 600, "hash_ids": [-1, 2]}',
        '{"input_length": 600, "hash_ids": [[1], [2]]}',
        '{"input_length": "600", "hash_ids": [1, 2]}',
        '{"input_length": 100, "hash_ids": [1]}',
        "",
    ],
)
def test_a_damaged_trace_is_refused_in_one_line(tmp_path, line):
    path = tmp_path / "trace.jsonl"
    path.write_text(line)
    with pytest.raises(UserError, match="trace") as caught:
        read_trace(path)
    assert "\n" not in str(caught.value)


def test_a_trace_that_is_missing_or_cut_is_refused_in_one_line(tmp_path):
    path = tmp_path / "trace.jsonl.gz"
    with pytest.raises(UserError, match="cannot read the trace"):
        read_trace(path)
    whole = gzip.compress(b'{"input_length": 600, "hash_ids": [1, 2]}\n' * 100)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="cannot read the trace"):
        read_trace(path)


def test_the_report_of_small_traces(tmp_path, monkeypatch, capsys):
    rows = [{"input_length": BLOCK * n + 9, "hash_ids": list(range(n + 1))} for n in range(1, 30)]
    text = "\n".join(map(json.dumps, rows))
    for file in TRACES.values():
        (tmp_path / f"{file}.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    out = tmp_path / "out.json"
    monkeypatch.setattr(
        sys, "argv", ["benchmark_policies", "--traces", str(tmp_path), "--json", str(out)]
    )
    assert benchmark_policies.main() == 0
    assert json.loads(out.read_text())["traces"]["agent"]["requests"] == len(rows)
    assert "conversation: within 4.1 GB/M the cheapest is" in capsys.readouterr().out


def test_a_trace_needs_a_whole_block_somewhere(tmp_path):
    path = tmp_path / "short.jsonl"
    path.write_text('{"input_length": 100, "hash_ids": [1]}\n')
    with pytest.raises(policy_model.TraceError, match="nothing can be reused"):
        read_trace(path)

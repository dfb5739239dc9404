"""The benchmark of the tiers: what it makes of its measurements. Nothing is measured here."""

import argparse
import sys

import numpy as np
import pytest
from places import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts"))

import benchmark_tiers
import benchmark_tiers_moves as moves
import benchmark_tiers_plans as plans
import benchmark_tiers_requests as requests

from hybridkv.blocks.entries import Tier
from hybridkv.engine.steps import MOVED_BLOCKS
from hybridkv.errors import UserError
from hybridkv.prefixes.plan import PlanOptions

LINE = {"bytes": 8, "gb_per_second": 9.0, "plain_gb_per_second": 10.0, "ratio": 0.9}
MOVES = {
    "block_bytes": 8,
    "snapshot_bytes": 8,
    "store_gb_per_second": 0.1,
    "disk_to_host": {"files": 1, "warm": LINE, "cold": None},
    "host_to_device": LINE | {"ratio": 0.7, "unverified": LINE},
    "through_mover": {"host": LINE, "disk_gb_per_second": 0.5},
    "device_to_host": LINE,
}


def cell(**seconds: list[float]) -> plans.Cell:
    keys = {"copied": (256, True, 3), "replayed": (128, False, 4), "cold": plans.COLD}
    return plans.Cell(
        tier=Tier.HOST,
        position=256,
        snapshot="near",
        chosen=keys["copied"],
        seconds={keys[name]: values for name, values in seconds.items()},
    )


def everything() -> dict:
    """A result of every part, as the command makes it."""
    decode = argparse.Namespace(windows=2, turns=2, slots=4, tokens=100)
    seconds = {"alone": [1.0] * 4, "host": [1.0] * 4, "disk": [2.0] * 4}
    side = {"seconds": 1.0, "all": [1.0], "share_of_cold": 0.04, "reused": 3}
    trace = {"gb_per_million": 4.1 + 1e-12, "restore_ratio": 1.25}
    row = {"gb_per_million": 1.0, "restore_ratio": 1.0, "first_token_ratio_of_hits": 1.0}
    result = {
        "device": "a device",
        "moves": {"flash": MOVES},
        "decode": requests._decoding(decode, seconds, dict(alone=0, host=2, disk=1), seconds),
        "first": {
            "tokens": 4,
            "opening_seconds": 1.0,
            "sides": {"host": side, "disk, restarted": side | {"share_of_cold": 0.2}},
        },
        "plans": plans.summary([cell(copied=[1.0], cold=[3.0]).result()]),
        "policies": {
            "tokens": 4,
            "cold_seconds": 1.0,
            "policies": {
                "full": {"snapshots": 1, "gb_per_million": 2.0, "share_of_cold": {"fork": 0.1}}
            },
        },
        "compilations": 0,
        "traces": {"agent": {"verdict": trace, "policies": {"full": row}}},
    }
    return result | {"bars": benchmark_tiers.judge(benchmark_tiers.values_of(result))}


def test_every_value_is_judged_in_its_own_direction():
    bars = everything()["bars"]
    met = {name: row["met"] for name, row in bars.items()}
    assert met == {
        "flash_disk_warm": True,
        "flash_host": False,
        "flash_host_unverified": True,
        "decode_host": True,
        "decode_disk": False,
        "first_host": True,
        "first_disk": False,
        "compilations": True,
        "trace_gigabytes": True,
        "trace_restore": False,
    }
    assert set(bars) <= set(benchmark_tiers.BARS)


def test_parts_that_were_not_measured_have_no_bars():
    assert benchmark_tiers.judge(benchmark_tiers.values_of({"moves": {}})) == {}


def test_the_report_shows_every_part(capsys):
    benchmark_tiers.report(everything())
    shown = capsys.readouterr().out
    for words in (
        "tiers on a device",
        "device to host",
        "4 requests decode",
        "snapshot",
    ):
        assert words in shown
    assert shown.count("NO") == 4


def test_decoding_is_compared_by_windows():
    sides = everything()["decode"]["sides"]
    assert sides["alone"]["tokens_per_second"] == 4.0
    assert sides["host"]["falls_by"] == 0.0
    assert sides["disk"]["falls_by"] == 0.5
    assert sides["disk"]["loads_ended"] == 1


def test_a_rate_is_ours_to_the_plain_one():
    line = moves.rates({"ours": [1.0, 4.0, 2.0], "plain": [1.0, 1.0, 9.0]}, 4 * 10**9)
    assert line["gb_per_second"] == 2.0
    assert line["plain_gb_per_second"] == 4.0
    assert line["ratio"] == 0.5


def test_sides_take_turns_and_who_goes_first_changes():
    ran: list[str] = []
    sides = {name: lambda name=name: ran.append(name) for name in "ab"}
    seconds = moves.alternate(sides, 3, before=lambda: ran.append("."))
    assert "".join(ran) == ".a.b.b.a.a.b"
    assert {name: len(values) for name, values in seconds.items()} == {"a": 3, "b": 3}


def test_a_move_is_filled_up_with_places_that_no_pool_has():
    places = moves.padded(np.array([3, 5], np.int32))
    assert places.shape == (MOVED_BLOCKS,)
    assert places[:2].tolist() == [3, 5]
    assert set(places[2:].tolist()) == {np.iinfo(np.int32).max}


def test_only_the_files_that_hold_arrays_are_read(tmp_path):
    chunk = tmp_path / "segments" / "ab" / "state" / "blocks" / "c" / "0"
    chunk.mkdir(parents=True)
    (chunk / "0").write_bytes(b"x" * 5000)
    (chunk / "1").write_bytes(b"x")
    (tmp_path / "segments" / "notes").write_bytes(b"x" * 5000)
    assert moves.data_files(tmp_path) == [chunk / "0"]
    moves.drop_caches([chunk / "0"])
    assert (chunk / "0").read_bytes() == b"x" * 5000


def test_the_regret_is_that_of_the_chosen_way():
    worse = cell(copied=[2.0, 2.0, 9.0], replayed=[1.0], cold=[5.0]).result()
    assert (worse["chosen"], worse["best"]) == ("snapshot 256, load 3", "replay 128, load 4")
    assert worse["regret"] == 1.0
    best = cell(copied=[1.0], cold=[5.0]).result()
    assert (best["best"], best["regret"]) == ("snapshot 256, load 3", 0.0)
    both = plans.summary([worse, best])
    assert both["largest_regret"] == 1.0
    assert both["mean_regret"] == 0.5
    assert both["regret_of_all"] == 0.5
    assert both["best_chosen"] == 1


def test_a_forced_way_is_the_cheapest_under_its_costs():
    usual = PlanOptions(tile=128, snapshot_bytes=1000)
    replay, copied = (plans.forced(usual, replay=x) for x in (True, False))
    assert replay.cost.copy(Tier.DEVICE, 1000) > 1e6 * replay.cost.tile_seconds
    assert not copied.replay
    assert copied.cost.copy(Tier.DEVICE, 1000) == 0.0


@pytest.mark.parametrize("position", [128, 512, 8192])
def test_a_prompt_gets_its_last_snapshot_where_the_grid_says(position):
    last = {}
    for name, policy in plans.snapshot_policies(position, 128).items():
        written = policy.positions(tokens=position, start=0, exact_from=0, shared=0, tile=128)
        last[name] = max(written, default=0)
    assert last["near"] == position
    assert last["absent"] == 0
    assert position == 128 or position // 2 <= last["far"] < position


def test_sizes_out_of_range_are_one_line():
    parser = argparse.ArgumentParser()
    benchmark_tiers.add_arguments(parser)
    for wrong in (["--rounds", "0"], ["--positions", "64"]):
        with pytest.raises(UserError, match="must be at least"):
            benchmark_tiers._check(parser.parse_args(wrong))

"""Packed rows restored by every way there is: the bits are those of a cold run."""

import functools

import pytest
from bookkeeping import give_up
from engines import LANES, TILE, Lab, Time, ids_of, make_engine, renewed, same
from tiered_lab import lab_with_tiers
from toy import toy_model, toy_options

from hybridkv.blocks.entries import Tier
from hybridkv.prefixes.policy import DENSE, NEVER
from models.deepseek_v4.cache_formats import CACHE_FORMATS
from models.deepseek_v4.runtime import DeepseekV4Runtime
from models.deepseek_v4.toy import WIDE_TOY

IDS, NEW = ids_of(5 * TILE + 3, seed=1), 6


@functools.cache
def packed_lab() -> Lab:
    """As ``toy_lab``, of a model whose rows are as the release's: one a process."""
    runtime = DeepseekV4Runtime(toy_model(WIDE_TOY), format=CACHE_FORMATS["release"])
    options = toy_options(tile=TILE, key_block=8, index_block=16, lanes=LANES)
    clock = Time()
    return Lab(make_engine(runtime, options, time=clock), clock)


@pytest.fixture
def lab():
    with renewed(packed_lab()) as lab:
        yield lab


def warm(lab, policy):
    """The prompt once more, after it was computed under a policy."""
    lab.finish(lab.submit(IDS, NEW, policy=policy))
    lab.engine.drain()
    handle = lab.submit(IDS, NEW)
    lab.finish(handle)
    return handle.output


def test_rows_are_bytes(lab):
    cache = lab.engine.runner.cache
    pools = (cache.compressed.layers[1], cache.indexer.layers[1], cache.sequence.window.layers[0])
    assert [(x.dtype, x.shape[-1]) for x in pools] == [
        ("uint8", 200),
        ("uint8", 68),
        ("uint8", 200),
    ]


def test_a_copied_state_gives_the_bits_of_a_cold_run(lab):
    alone, output = lab.alone(IDS, NEW), warm(lab, DENSE)
    assert same(output, alone)
    assert (output.reused, output.replayed) == (5 * TILE, 0)


def test_a_replayed_state_gives_the_bits_of_a_cold_run(lab):
    alone, output = lab.alone(IDS, NEW), warm(lab, NEVER)
    assert same(output, alone)
    assert output.reused + output.replayed == 5 * TILE
    assert min(output.reused, output.replayed) > 0


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
def test_what_other_tiers_hold_gives_the_bits_of_a_cold_run(lab, tmp_path, tier):
    alone = lab.alone(IDS, NEW)
    with lab_with_tiers(lab, tmp_path) as mover:
        lab.finish(lab.submit(IDS, NEW, policy=DENSE))
        lab.engine.drain()
        assert mover.flush(timeout_s=300)
        give_up(lab.engine.runner.allocator, *(faster for faster in Tier if faster < tier))
        handle = lab.submit(IDS, NEW)
        lab.finish(handle)
        assert same(handle.output, alone)
        assert handle.output.reused == 5 * TILE
        assert mover.counters.loaded[tier] == 6


def test_neighbours_do_not_change_a_bit(lab):
    alone = lab.alone(IDS, NEW)
    others = [lab.submit(ids_of(length, seed=length), 20) for length in (19, 70)]
    lab.steps(4)
    handle = lab.submit(IDS, NEW)
    lab.finish(handle, *others)
    assert same(handle.output, alone)

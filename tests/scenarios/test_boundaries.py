"""Around windows, cells, blocks and tiles: every length, every cut, every position."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from toy import digest

from hybridkv.blocks.entries import Tier
from hybridkv.errors import UserError
from hybridkv.prefixes.policy import DENSE, NEVER
from hybridkv.state.compressed import write_rows
from scenarios.runs import TILE, joined

WINDOW, RATIO = 8, 4
AROUND = sorted({n + d for n in (WINDOW, RATIO, 2 * RATIO, TILE, 2 * TILE) for d in (-1, 0, 1)})
CLOSE = {"atol": 2e-5, "rtol": 1e-5}
"""Two executables need not give the same bits, but must compute the same function."""


@pytest.mark.parametrize("length", AROUND)
def test_b078_a_prompt_at_once_agrees_with_one_token_after_the_other(bench, length):
    ids = bench.ids(length)
    once = bench.cold(ids, bench.ids(0)).logits
    np.testing.assert_allclose(bench.token_by_token(ids), once, **CLOSE)


@pytest.mark.parametrize("length", AROUND)
def test_b078_the_length_of_a_prompt_changes_no_earlier_bit(bench, length):
    ids = bench.ids(70)
    whole = bench.cold(ids, bench.ids(0)).logits
    part = bench.cold(ids[:length], bench.ids(0)).logits
    assert digest(part) == digest(whole[:length])


@pytest.mark.parametrize("length", [23, 24, 39, 40, 41, 48])
def test_b080_the_last_rows_of_the_window_are_there_whatever_came_in_one_tile(bench, length):
    ids = bench.ids(length)

    def ring(namespace, policy):
        sequence = bench.runner.start(ids, namespace=namespace, policy=policy)
        bench.runner.prefill(sequence)
        positions = np.arange(length - WINDOW + 1, length)
        layers = bench.runner.cache.sequence.window.layers
        rows = [np.asarray(x[sequence.slot])[positions % WINDOW] for x in layers]
        bench.runner.finish(sequence)
        return sequence.start, digest(np.stack(rows))

    namespace = bench.namespace()
    start, cold = ring(namespace, DENSE)
    bench.spoil_slots()
    resumed, warm = ring(namespace, NEVER)
    assert (start, resumed) == (0, (length - 1) // TILE * TILE)
    assert warm == cold


@pytest.mark.parametrize("length", [1, 3, 4, 16, 37, 64, 75])
def test_b081_every_complete_cell_of_a_prompt_is_written(bench, length):
    runner = bench.runner
    sequence = runner.start(bench.ids(length), namespace=bench.namespace(), policy=NEVER)
    bench.spoil_blocks(bench.places(sequence))
    runner.prefill(sequence)
    for pools, layers in (("compressed", {1: 4, 2: 16, 3: 4}), ("indexer", {1: 4, 3: 4})):
        for layer, ratio in layers.items():
            written = np.isfinite(bench.rows(sequence, layer, pools)).all(axis=1)
            assert written[: length // ratio].all()
            assert not written[length // ratio :].any()
    runner.finish(sequence)


def test_b082_a_tile_larger_than_the_window_shows_its_first_queries_their_window(bench):
    assert bench.runner.options.tile == 2 * WINDOW
    ids = bench.ids(70)
    changed = ids.copy()
    changed[30] = (changed[30] + 1) % 64
    one, two = (bench.cold(x, bench.ids(0)).logits for x in (ids, changed))
    differs = (one != two).any(axis=1)
    assert not differs[:30].any()
    # The token itself and every query that sees its row, across the end of the tile at 32.
    assert differs[30 : 30 + WINDOW].all()
    np.testing.assert_allclose(bench.token_by_token(ids), one, **CLOSE)


def test_b084_picks_are_made_among_all_rows_and_not_the_last_tiles(bench):
    ids, after = bench.ids(150), bench.ids(4)
    cold, namespace = bench.cold(ids, after), bench.namespace()
    bench.run(ids, after, namespace, policy=DENSE)
    runner = bench.runner
    entries = runner.directory.find(runner.chain(ids, namespace=namespace)).entries
    places = runner.allocator.entries.place[Tier.DEVICE, entries[:2]]
    layers = tuple(
        None if x is None else x.at[places].set(-x[places] * 50)
        for x in runner.cache.indexer.layers
    )
    indexer = dataclasses.replace(runner.cache.indexer, layers=layers)
    runner.cache = dataclasses.replace(runner.cache, indexer=indexer)
    warm = bench.run(ids, after, namespace)
    assert warm.start == 144
    assert not warm.continues(cold)


@pytest.mark.parametrize("cuts", [(1,), (2,), (3,), (1, 2, 3, 4), (4,), (2, 4)])
def test_b085_a_prompt_cut_anywhere_and_taken_up_again_gives_cold_bits(bench, cuts):
    ids, after = bench.ids(75), bench.ids(5)
    cold, namespace = bench.cold(ids, after), bench.namespace()
    runner = bench.runner
    for tiles in cuts:
        sequence = runner.start(ids, namespace=namespace, policy=DENSE)
        while sequence.computed < tiles * TILE:
            runner.tile(sequence)
        runner.finish(sequence)
        bench.spoil_slots()
    warm = bench.run(ids, after, namespace)
    assert warm.start == cuts[-1] * TILE
    assert warm.continues(cold)


@pytest.mark.parametrize("length", [RATIO - 1, RATIO, RATIO + 1])
def test_b086_the_first_cell_is_whole_at_its_last_token_and_not_before(bench, length):
    ids = bench.ids(RATIO + 1)
    assert np.isfinite(bench.cold(ids[:length], bench.ids(9)).after).all()
    whole, namespace = bench.cold(ids, bench.ids(0)).logits, bench.namespace()
    sequence = bench.runner.start(ids[:length], namespace=namespace, policy=NEVER)
    bench.spoil_blocks(bench.places(sequence))
    logits = bench.runner.prefill(sequence)
    assert np.isfinite(bench.rows(sequence, 1)[0]).all() == (length >= RATIO)
    assert digest(logits) == digest(whole[:length])
    bench.runner.finish(sequence)


@pytest.mark.parametrize("at", [5, 15, 16, 31, 40, 63])
def test_b088_no_query_sees_a_later_token(bench, at):
    ids = bench.ids(64)
    changed = joined(ids[:at], (ids[at:] + 1) % 64)
    one, two = (bench.cold(x, bench.ids(0)).logits for x in (ids, changed))
    assert digest(one[:at]) == digest(two[:at])
    assert digest(one[at]) != digest(two[at])


@pytest.mark.parametrize("length", [5, 7])
def test_b089_a_prompt_shorter_than_the_window_makes_the_rows_that_it_has(bench, length):
    ids, after = bench.ids(length), bench.ids(12)
    prefilled = bench.cold(ids, after).after
    whole = bench.token_by_token(joined(ids, after))
    np.testing.assert_allclose(prefilled, whole[length:], **CLOSE)


@pytest.mark.parametrize("start", [1, 2, 15, 16, 17, 31])
def test_b090_decoding_goes_on_where_a_prompt_ended(bench, start):
    ids = bench.ids(start + 20)
    after = bench.cold(ids[:start], ids[start:]).after
    whole = bench.cold(ids, bench.ids(0)).logits
    np.testing.assert_allclose(after, whole[start:], **CLOSE)


def test_b092_a_position_past_the_table_is_refused_and_never_another_blocks(bench):
    table = jnp.asarray([2, 0, 4], jnp.int32)  # the pool has four blocks: 4 is nowhere
    pool = jnp.zeros((4, 4, 2), jnp.float32)
    numbers = jnp.arange(12, dtype=jnp.int32)
    written = write_rows(pool, table, numbers, numbers >= 0, jnp.ones((12, 2), jnp.float32))
    assert np.asarray(written).any(axis=(1, 2)).tolist() == [True, False, True, False]
    sequence = bench.runner.start(bench.ids(15), namespace=bench.namespace(), max_new_tokens=1)
    bench.runner.prefill(sequence)
    bench.runner.decode({sequence: 1})
    with pytest.raises(UserError, match="larger max_new_tokens"):
        bench.runner.decode({sequence: 1})
    bench.runner.finish(sequence)


def test_b093_rows_of_a_suffix_stand_at_absolute_positions(bench):
    ids, namespace = bench.ids(80), bench.namespace()

    def rows_of_a_run(namespace):
        sequence = bench.runner.start(ids, namespace=namespace, policy=NEVER)
        bench.runner.prefill(sequence)
        rows = [bench.rows(sequence, layer) for layer in (1, 2, 3)]
        rows += [bench.rows(sequence, layer, "indexer") for layer in (1, 3)]
        bench.runner.finish(sequence)
        return sequence.start, [digest(x[: 80 * len(x) // 96]) for x in rows]

    _, cold = rows_of_a_run(bench.namespace())
    bench.run(joined(ids[:32], bench.ids(20)), bench.ids(0), namespace, policy=DENSE)
    start, warm = rows_of_a_run(namespace)
    assert start == 32
    assert warm == cold


@pytest.mark.parametrize("length", [24, 33, 48, 57])
def test_every_way_to_the_end_of_a_prompt_gives_the_same_bits(bench, length):
    """At once, resumed at each boundary by copy and by replay, and with neighbours."""
    ids, after = bench.ids(length), bench.ids(4)
    cold = bench.cold(ids, after)
    for position in range(TILE, length, TILE):
        for policy in (DENSE, NEVER):
            namespace = bench.namespace()
            bench.run(joined(ids[:position], bench.ids(3)), after, namespace, policy=policy)
            bench.spoil_slots()
            warm = bench.run(ids, after, namespace)
            assert warm.shared == position
            assert warm.continues(cold)

"""Rows gathered by SparseCores, interpreted: against numpy, and what attends them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import tpu, tpu_gather
from pallas_kernels.blocks import BlockRows
from pallas_kernels.index_scores.api import NO_ROW
from pallas_kernels.interpreting import checked
from pallas_kernels.packing import api as packing
from pallas_kernels.packing.layout import RowLayout
from pallas_kernels.sequences import Active

FAST = {"xla_backend_optimization_level": 0}
"""Compiling the interpreter is most of the time."""


def pooled(rng, n, columns, blocks, per, words):
    """Random words; blocks in random order, some shared, and stale entries that say anything."""
    pool = rng.integers(0, 2**32, (blocks, per, words), dtype=np.uint64).astype(np.uint32)
    table = rng.integers(0, blocks, (n, columns)).astype(np.int32)
    return pool, table


def picked(rng, counts, rows, places):
    """Ascending picks, so many of each query, then free places."""
    picks = np.full((*counts.shape, places), NO_ROW, np.int32)
    for at in np.ndindex(*counts.shape):
        picks[at][: counts[at]] = np.sort(rng.choice(rows, counts[at], replace=False))
    return picks


def gathered(pool, table, picks, per_block=32):
    def function(*arrays):
        *rows, picks = arrays
        return tpu_gather.gather(BlockRows(*rows), picks, per_block=per_block)

    arrays = [jnp.asarray(x) for x in (pool, table, picks)]
    with checked():
        out = jax.jit(function, compiler_options=FAST)(*arrays)
        return np.asarray(out).reshape(*picks.shape, pool.shape[-1])


@pytest.mark.parametrize(
    ("per", "words", "counts"),
    [(8, 256, [[64], [0]]), (16, 128, [[1, 33], [31, 32]]), (1, 256, [[40]]), (2, 384, [[7]])],
    ids=str,
)
def test_every_pick_finds_its_row_through_the_block_table(per, words, counts):
    rng, counts = np.random.default_rng(per), np.asarray(counts)
    columns = 64 // per + 1
    pool, table = pooled(rng, len(counts), columns, 50, per, words)
    picks = picked(rng, counts, columns * per, 64)
    got = gathered(pool, table, picks)
    for i, j in np.ndindex(*counts.shape):
        own = picks[i, j, : counts[i, j]]
        np.testing.assert_array_equal(
            got[i, j, : counts[i, j]], pool[table[i, own // per], own % per]
        )


def test_what_a_table_says_beyond_the_pool_is_never_read():
    """As the API has it: such entries are clamped, whatever they are."""
    rng = np.random.default_rng(5)
    pool, table = pooled(rng, 1, 4, 6, 8, 128)
    table[0, 1:3] = -1, 2**31 - 1
    got = gathered(pool, table, np.arange(32, dtype=np.int32)[None, None])
    want = pool[np.clip(table[0], 0, 5)].reshape(32, 128)
    np.testing.assert_array_equal(got[0, 0], want)


@pytest.mark.parametrize("rounds", [1, 31, 32, 33, 500])
def test_every_round_is_one_subcores(rounds):
    """The interpreter has a single subcore: how the others share the work is arithmetic."""
    spans = [tpu_gather.rounds_of(i, rounds, 32) for i in range(32)]
    covered = [r for first, last in spans for r in range(int(first), int(last))]
    assert covered == list(range(rounds))


@pytest.mark.parametrize("changed", ["halves", "odd rows", "narrow rows"])
def test_pools_that_are_no_lines_of_words_are_left_to_xla(changed):
    shape = {"halves": (4, 8, 128), "odd rows": (4, 6, 128), "narrow rows": (4, 8, 64)}[changed]
    dtype = jnp.uint16 if changed == "halves" else jnp.uint32
    with checked():  # no kernel runs: what is asked for is whether there are SparseCores
        rows = BlockRows(jnp.zeros(shape, dtype), jnp.zeros((1, 2), jnp.int32))
        assert not tpu_gather.can_gather(rows)
        assert tpu_gather.can_gather(BlockRows(jnp.zeros((4, 8, 128), jnp.uint32), rows.table))


class Attended:
    """A small batch of a wide row; its picks are gathered by SparseCores where rows are words."""

    heads, width, window = 8, 256, 5

    def __init__(self, counts, per=8):
        self.per = per
        rng = np.random.default_rng(3)
        n, t = counts.shape
        self.q = jnp.asarray(rng.normal(size=(n, t, self.heads, self.width)), jnp.float32)
        self.local = rng.normal(size=(n, self.window - 1 + t, self.width))
        self.rows = rng.normal(size=(30, self.per, self.width))
        self.rows[3:5] = np.nan  # of nobody
        self.table = jnp.asarray(rng.choice(np.delete(np.arange(30), [3, 4]), (n, 12)), jnp.int32)
        self.picks = picked(rng, counts, 93, 64) if per == 8 else None
        self.sink = jnp.asarray(rng.normal(size=self.heads), jnp.float32)

    def run(self, format, *, visible, picks=True):
        n, t = self.q.shape[:2]

        def function(pool, visible, picks):
            return tpu.attend(
                self.q,
                packing.encode(self.local, "bfloat16"),
                jnp.full((n,), 40, jnp.int32),
                self.sink,
                active=Active(jnp.arange(n, dtype=jnp.int32), jnp.int32(n)),
                window=self.window,
                scale=0.1,
                rows=BlockRows(pool, self.table),
                visible=visible,
                picks=picks,
                key_block=1,
                format=format,
                local_format="bfloat16",
                tuning=tpu.Tuning(keys=64),
            )

        layout = RowLayout(format, self.width)
        pool = packing.encode(jnp.asarray(self.rows, jnp.float32), layout)
        seen = jnp.full((n, t), visible, jnp.int32)
        given = jnp.asarray(self.picks) if picks else None
        with checked():
            return np.asarray(jax.jit(function, compiler_options=FAST)(pool, seen, given))


@pytest.mark.parametrize(
    ("visible", "picks", "per", "gathers"),
    [(93, True, 8, 1), (20, True, 8, 1), (61, False, 8, 0), (45, False, 4, 1)],
    ids=["picks", "picks that are not seen", "all rows", "all rows of small blocks"],
)
def test_words_give_the_bits_of_the_same_numbers_in_halves(
    visible, picks, per, gathers, monkeypatch
):
    batch = Attended(np.asarray([[64, 3], [0, 40]]), per)
    calls = []
    gather = tpu_gather.gather
    monkeypatch.setattr(tpu_gather, "gather", lambda *a, **k: calls.append(1) or gather(*a, **k))
    words = batch.run("bfloat16_words", visible=visible, picks=picks)
    assert len(calls) == gathers
    halves = batch.run("bfloat16", visible=visible, picks=picks)
    assert len(calls) == gathers  # not by SparseCores
    assert np.isfinite(words).all()
    np.testing.assert_array_equal(words.view(np.uint32), halves.view(np.uint32))

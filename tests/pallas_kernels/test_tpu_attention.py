"""The TPU kernel of ``attend``, interpreted, against float64, and the bits that must not change."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import tpu, tpu_kernel
from pallas_kernels.blocks import BlockRows
from pallas_kernels.index_scores.api import NO_ROW
from pallas_kernels.interpreting import checked
from pallas_kernels.packing import api as packing
from pallas_kernels.packing.layout import RowLayout
from pallas_kernels.sequences import Active
from pallas_kernels.tuning.table import trying

HEADS, WIDTH, SCALE, WINDOW, KEYS = 8, 128, 0.15, 5, 16
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}
"""bfloat16 weights are off by 1/512 each, and values are up to 4."""


@functools.cache
def compiled(format="float32", *, keys=KEYS, queries=8, window=WINDOW, local_format=None):
    def function(q, local, first, sink, order, count, rows, visible, picks):
        return tpu.attend(
            q,
            local,
            first,
            sink,
            active=Active(order, count),
            window=window,
            scale=SCALE,
            rows=rows,
            visible=visible,
            picks=picks,
            key_block=1,
            format=format,
            local_format=local_format or format,
            tuning=tpu.Tuning(keys=keys, queries=queries),
        )

    # Compiling the interpreter is most of the time.
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


def as_halves(x):
    return np.asarray(jnp.asarray(x, jnp.float32).astype(jnp.bfloat16).astype(jnp.float32))


def stored(x, format):
    if format == "float32":
        return jnp.asarray(x, jnp.float32)
    return jax.lax.bitcast_convert_type(jnp.asarray(x).astype(jnp.bfloat16), jnp.uint16)


class Batch:
    """Sequences with these numbers of rows. Each one's values depend on its ``seed`` alone."""

    def __init__(self, lengths, *, t=1, first=60, window=WINDOW, visible=None, seeds=None, sink=1):
        self.lengths, self.t, self.window, n = list(lengths), t, window, len(lengths)
        self.first = np.broadcast_to(np.asarray(first, np.int32), (n,)).copy()
        seeds = range(n) if seeds is None else seeds
        draws = [np.random.default_rng(seed) for seed in seeds]
        self.q = np.stack([as_halves(d.normal(size=(t, HEADS, WIDTH))) for d in draws])
        self.local = np.stack([as_halves(d.normal(size=(window - 1 + t, WIDTH))) for d in draws])
        self.rows = [
            as_halves(d.normal(size=(s, WIDTH))) for d, s in zip(draws, lengths, strict=True)
        ]
        self.sink = np.random.default_rng(99).normal(size=HEADS).astype(np.float32) * sink
        back = np.arange(t)[::-1] // 3
        natural = np.maximum(np.asarray(lengths)[:, None] - back, 0)
        self.visible = (natural if visible is None else np.asarray(visible)).astype(np.int32)

    def pooled(self, format, *, per=8, blocks=30, columns=6, seed=0, fill=np.nan):
        """Rows in random blocks. What no row fills, and what stale table entries say, is wild."""
        rng = np.random.default_rng(seed)
        pool = np.full((blocks, per, WIDTH), fill, np.float32)
        wild = [-1, -(2**31), 2**31 - 1, blocks, 0]
        table = rng.choice(wild, (len(self.rows), columns)).astype(np.int64)
        free = iter(rng.permutation(blocks))
        for i, rows in enumerate(self.rows):
            for r, row in enumerate(rows):
                if r % per == 0:
                    table[i, r // per] = next(free)
                pool[table[i, r // per], r % per] = row
        return BlockRows(stored(pool, format), jnp.asarray(table, jnp.int32))

    def run(self, format="float32", *, picks=None, rows=True, order=None, count=None, **options):
        pool = {
            k: options.pop(k) for k in ("per", "blocks", "columns", "seed", "fill") & options.keys()
        }
        n = len(self.lengths)
        order = list(range(n)) if order is None else order
        local_format = options.get("local_format") or format
        arguments = (
            jnp.asarray(self.q),
            stored(self.local, local_format),
            jnp.asarray(self.first),
            jnp.asarray(self.sink),
            jnp.asarray(order, jnp.int32),
            jnp.asarray(n if count is None else count, jnp.int32),
            self.pooled(format, **pool) if rows else None,
            jnp.asarray(self.visible) if rows else None,
            None if picks is None else jnp.asarray(picks, jnp.int32),
        )
        with checked():
            return np.asarray(compiled(format, window=self.window, **options)(*arguments))

    def expected(self, picks=None, rows=True):
        out = np.zeros(self.q.shape)
        for i, j in itertools.product(range(len(self.lengths)), range(self.t)):
            position = self.first[i] + j
            near = range(max(position - self.window + 1, 0), position + 1)
            keys = [self.local[i, p - self.first[i] + self.window - 1] for p in near]
            if rows:
                chosen = range(self.visible[i, j]) if picks is None else picks[i][j]
                keys += [self.rows[i][s] for s in chosen if s < self.visible[i, j]]
            keys = np.asarray(keys, np.float64)
            logits = keys @ (self.q[i, j].astype(np.float64) * SCALE).T
            top = np.maximum(logits.max(axis=0), self.sink)
            weights = np.exp(logits - top)
            total = weights.sum(axis=0) + np.exp(self.sink - top)
            out[i, j] = weights.T @ keys / total[:, None]
        return out

    def check(self, format="float32", *, picks=None, rows=True, **options):
        got = self.run(format, picks=picks, rows=rows, **options)
        assert got.dtype == np.float32
        atol = TOLERANCE[format]
        np.testing.assert_allclose(got, self.expected(picks, rows), atol=atol, rtol=atol)


FORMATS = pytest.mark.parametrize("format", ["float32", "bfloat16"])


@FORMATS
@pytest.mark.parametrize(
    "lengths",
    [(0, 1, 7, 8), (9, 15, 16, 17), (31, 32, 33, 0), (47, 48, 0, 0), (0, 0, 0, 5)],
    ids=str,
)
def test_any_numbers_of_rows_match_float64(format, lengths):
    Batch(lengths).check(format)


def test_windows_longer_than_the_past_match_float64():
    batch = Batch((3, 0, 17, 33), first=(0, 1, 3, 4))
    batch.local[0, : WINDOW - 1] = np.nan
    batch.local[1, : WINDOW - 2] = np.nan
    batch.check()
    batch.check("bfloat16")


@pytest.mark.parametrize("count", [0, 1, 3])
def test_idle_sequences_are_zero_and_change_no_other(count):
    batch = Batch((9, 40, 0, 33))
    order = [2, 3, 1, 0]
    full, got = batch.run(), batch.run(order=order, count=count)
    np.testing.assert_array_equal(got[order[:count]], full[order[:count]])
    assert not got[order[count:]].any()


@pytest.mark.parametrize(("format", "queries"), [("float32", 8), ("float32", 6), ("bfloat16", 8)])
def test_chunks_of_queries_match_float64(format, queries):
    t = 24 if queries == 8 else 18
    Batch((40, 3, 17), t=t, first=(70, 0, 2)).check(format, queries=queries)


def test_a_window_wider_than_a_register_matches_float64():
    Batch((20, 3), t=16, first=(300, 40), window=130).check()


def test_single_queries_of_a_long_tile_match_float64():
    Batch((20, 2), t=11, first=(300, 4)).check(queries=1)


@pytest.mark.parametrize("t", [1, 16])
def test_a_window_alone_matches_float64(t):
    Batch((0, 0, 0, 0), t=t, first=(80, 2, 0, 5)).check(rows=False)


def test_rows_that_nobody_sees_change_no_bit():
    batch = Batch((40, 20, 3, 0), visible=np.zeros((4, 1)))
    np.testing.assert_array_equal(batch.run(), batch.run(rows=False))


def test_window_rows_of_another_format_are_read_as_they_are_stored():
    batch = Batch((20, 3), first=(3, 60))
    got = batch.run("bfloat16", local_format="float32")
    np.testing.assert_allclose(got, batch.expected(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    ("per", "format", "columns", "blocks"),
    [
        (1, "float32", 20, 40),
        (2, "bfloat16", 10, 30),
        (16, "bfloat16", 2, 9),
    ],
)
def test_any_block_size_matches_float64(per, format, columns, blocks):
    Batch((17, 9)).check(format, per=per, columns=columns, blocks=blocks, keys=8)


def test_blocks_larger_than_a_key_block_match_float64():
    Batch((100, 3)).check(per=64, columns=2, blocks=6)


def test_many_small_blocks_are_copied_in_steps():
    keys = 2 * (tpu_kernel._UNROLLED // 2 + 2)
    Batch((3 * keys + 1, 0, 2)).check("bfloat16", per=2, keys=keys, columns=200, blocks=300)


@pytest.mark.parametrize("sink", [-1e4, 1e4])
def test_sink_only_joins_the_denominator(sink):
    batch = Batch((20, 0, 3, 17), sink=0)
    batch.sink[:] = sink
    batch.check()
    assert batch.run().any() == (sink < 0)


def test_large_logits_do_not_overflow():
    batch = Batch((20, 0, 33, 17))
    batch.q *= 300
    got = batch.run()
    np.testing.assert_allclose(got, batch.expected(), atol=1e-3, rtol=1e-3)


def picked(batch, k, seed=0):
    """Per query some visible rows, then some not visible, then free places; ascending."""
    rng = np.random.default_rng(seed)
    picks = np.full((len(batch.lengths), batch.t, k), NO_ROW, np.int64)
    for i, j in itertools.product(range(len(batch.lengths)), range(batch.t)):
        visible = batch.visible[i, j]
        some = rng.permutation(visible)[: rng.integers(0, k + 1)]
        some = np.concatenate([some, [visible, visible + 3][: k - len(some)]])
        picks[i, j, : len(some)] = np.sort(some)
    return picks


@FORMATS
@pytest.mark.parametrize("seed", [0, 1])
def test_only_picked_rows_are_attended(format, seed):
    batch = Batch((47, 0, 30, 3), first=(90, 0, 60, 20))
    batch.check(format, picks=picked(batch, 21, seed))


def test_every_query_of_a_tile_has_its_own_picks():
    batch = Batch((47, 5), t=10, first=(90, 0))
    batch.check(picks=picked(batch, 21))


def test_a_tile_whose_picks_are_gathered_in_parts_is_the_same(monkeypatch):
    batch = Batch((47, 5), t=2, first=(90, 0))
    picks = picked(batch, 21)
    whole = batch.run(picks=picks)
    monkeypatch.setattr(tpu, "_GATHERED_BYTES", 2 * 21 * WIDTH * 4)
    compiled.cache_clear()
    np.testing.assert_array_equal(batch.run(picks=picks), whole)
    compiled.cache_clear()


def test_more_picks_than_a_block_of_gathered_rows_match_float64():
    batch = Batch((150, 90), t=2)
    batch.check(picks=picked(batch, 100), per=8, columns=20, blocks=40)


def test_no_pick_at_all_is_the_window_alone():
    batch = Batch((20, 9, 0, 3))
    picks = np.full((4, 1, 21), NO_ROW)
    np.testing.assert_array_equal(batch.run(picks=picks), batch.run(rows=False))


def test_picks_at_or_past_visible_are_ignored():
    batch = Batch((20, 9, 20, 20), visible=[[4], [7], [0], [1]])
    within = np.full((4, 1, 21), NO_ROW)
    within[:2, 0, :2] = [[0, 2], [1, 6]]
    beyond = within.copy()
    beyond[:, 0, 2:4] = [[4, 11], [7, 8], [0, 1], [1, 5]]
    beyond[2:] = np.sort(beyond[2:])
    np.testing.assert_array_equal(batch.run(picks=beyond), batch.run(picks=within))


@pytest.mark.parametrize(
    ("format", "routed"), [("bfloat16", False), ("float32", True)], ids=["all rows", "picks"]
)
def test_capacity_order_of_blocks_and_stale_bytes_change_no_bit(format, routed):
    batch = Batch((37, 0, 17, 5))
    picks = picked(batch, 21) if routed else None
    expected = batch.run(format, picks=picks)
    assert np.isfinite(expected).all()
    for other in (
        {"columns": 9, "blocks": 77},
        {"seed": 3},
        {"fill": np.inf},
        {"fill": 0.0},
        {"fill": 1e38},
    ):
        got = batch.run(format, picks=picks, **other)
        np.testing.assert_array_equal(got, expected, err_msg=str(other))


@pytest.mark.parametrize("t", [1, 16])
def test_neighbours_and_the_order_of_work_change_no_bit(t):
    batch = Batch((37, 3, 48, 0), t=t, first=(60, 4, 90, 0))
    together = batch.run()
    np.testing.assert_array_equal(batch.run(order=[3, 1, 0, 2]), together)
    for i, length in enumerate(batch.lengths):
        alone = Batch([length], t=t, first=batch.first[i : i + 1], seeds=[i]).run()
        np.testing.assert_array_equal(alone[0], together[i])


def test_masked_key_blocks_change_no_bit_of_earlier_queries():
    """The last query of a chunk decides how many key blocks are read."""
    visible = np.full((1, 8), 5)
    few = Batch([48], t=8, visible=visible).run()
    for last in (6, 16, 17, 48):
        visible[0, -1] = last
        many = Batch([48], t=8, visible=visible).run()
        np.testing.assert_array_equal(many[0, :-1], few[0, :-1])
        assert (many[0, -1] != few[0, -1]).any()


def shapes(*, n=2, t=1, heads=HEADS, width=WIDTH, per=8, columns=4, dtype=jnp.float32):
    def of(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype)

    pool, table = of(9, per, width, dtype=dtype), of(n, columns, dtype=jnp.int32)
    return (
        of(n, t, heads, width),
        of(n, WINDOW - 1 + t, width, dtype=dtype),
        of(n, dtype=jnp.int32),
        of(heads),
        of(n, dtype=jnp.int32),
        of(dtype=jnp.int32),
        BlockRows(pool, table),
        of(n, t, dtype=jnp.int32),
        None,
    )


def test_abstract_arguments_are_enough_to_trace():
    out = jax.eval_shape(compiled(), *shapes(t=8))
    assert (out.shape, out.dtype) == ((2, 8, HEADS, WIDTH), jnp.float32)


@pytest.mark.parametrize(
    ("format", "options", "reason"),
    [
        ("float32", {"heads": 6}, "heads must be a multiple of 8"),
        ("float32", {"width": 64}, "the width one of 128"),
        ("bfloat16", {"per": 1, "dtype": jnp.uint16}, "more cells in a block"),
        ("float32", {"per": 12}, "rows a block must be"),
        ("float32", {"columns": 100_000}, "more cells in a block, or fewer sequences"),
        ("float32", {"t": 49_600}, "shorten the tile"),
        ("fp8_rope16", {"dtype": jnp.uint8}, "use float32 or bfloat16"),
    ],
)
def test_what_is_not_supported_is_refused_before_anything_is_traced(format, options, reason):
    with pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(compiled(format), *shapes(**options))


def test_a_window_of_words_alone_gives_the_bits_of_the_same_numbers_in_halves():
    width, window = 256, 8
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(2, 1, HEADS, width)), jnp.float32)
    rows = jnp.asarray(rng.normal(size=(2, window, width)), jnp.float32)

    def run(format):
        local = packing.encode(rows, format)
        with checked():
            out = jax.jit(
                lambda: tpu.attend(
                    q,
                    local,
                    jnp.asarray([3, 60], jnp.int32),
                    jnp.zeros(HEADS),
                    active=Active.all(2),
                    window=window,
                    scale=SCALE,
                    local_format=format,
                ),
                compiler_options={"xla_backend_optimization_level": 0},
            )()
            return np.asarray(out)

    np.testing.assert_array_equal(run("bfloat16_words"), run("bfloat16"))


def test_outside_of_a_trace_only_the_missing_device_is_in_the_way():
    with pytest.raises(ValueError, match="interpret"):
        tpu.attend(
            jnp.zeros((1, 1, 16, 128)),
            jnp.zeros((1, 8, 128)),
            jnp.zeros(1, jnp.int32),
            jnp.zeros(16),
            active=Active.all(1),
            window=8,
            scale=1.0,
        )


def test_pairs_of_packed_blocks_have_at_least_four_buffers():
    """With two each item would wait for one whose copies it starts itself."""
    layout = RowLayout("fp8_rope16", 128, 64)
    blocks = tpu.KeyBlocks(
        size=32, per_block=8, blocks=9, tabled=True, dtype=jnp.bfloat16, paired=True, packed=layout
    )
    for buffers, packed, plain in ((2, 4, 2), (8, 8, 8)):
        with trying("attention/tpu", buffers=buffers):
            assert tpu._staging(layout, 128, blocks).buffers == packed
            halves = dataclasses.replace(blocks, packed=None)
            assert tpu._staging("bfloat16", 128, halves).buffers == plain

"""The TPU kernel of ``attend`` over packed rows, interpreted, against float64 of decoded rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_tpu_attention import HEADS, WIDTH, WINDOW, Batch, compiled, picked

from pallas_kernels.blocks import BlockRows
from pallas_kernels.interpreting import checked
from pallas_kernels.packing import reference, tpu_rows
from pallas_kernels.packing.layout import RowLayout

KEYS = 32
LAYOUT = RowLayout("fp8_rope16", WIDTH, 64)
TOLERANCE = 2e-2
"""bfloat16 weights are off by 1/512 each, and values are up to 4."""


def compiled_packed(local_format, queries=8):
    return compiled(LAYOUT, keys=KEYS, queries=queries, local_format=local_format)


@functools.cache
def packing(operation, format):
    return jax.jit(functools.partial(operation, format=format))


def encoded(x, format):
    """Of up to 160 rows, so that one program will do."""
    rows = np.zeros((160, WIDTH), np.float32)
    rows[: len(x)] = x
    return np.array(packing(reference.encode, format)(rows))[: len(x)]


def decoded(x, format):
    """What is attended: values are as they were encoded."""
    stored = packing(reference.encode, format)(np.resize(x, (160, WIDTH)))
    return np.array(packing(reference.decode, format)(stored))[: len(x)]


class Packed(Batch):
    """A batch whose rows, and window rows if asked, are packed bytes."""

    def __init__(self, lengths, *, local_format=LAYOUT, **options):
        super().__init__(lengths, **options)
        self.local_format = local_format
        self.rows = [decoded(x, LAYOUT) if len(x) else x for x in self.rows]
        self.local = np.stack([decoded(x, local_format) for x in self.local])
        self.local_bytes = np.stack([encoded(x, local_format) for x in self.local])

    def pooled(self, *, per=8, blocks=30, columns=9, seed=0, fill=0xFF, stored=None):
        """All that is no row is ``fill``: 0xFF are NaN codes and NaN scales."""
        rng = np.random.default_rng(seed)
        pool = np.full((blocks, per, stored or LAYOUT.row_bytes), fill, np.uint8)
        wild = [-1, -(2**31), 2**31 - 1, blocks, 0]
        table = rng.choice(wild, (len(self.rows), columns)).astype(np.int64)
        free = iter(rng.permutation(blocks))
        for i, rows in enumerate(self.rows):
            for r, row in enumerate(encoded(rows, LAYOUT) if len(rows) else ()):
                if r % per == 0:
                    table[i, r // per] = next(free)
                pool[table[i, r // per], r % per, : LAYOUT.row_bytes] = row
        return BlockRows(jnp.asarray(pool), jnp.asarray(table, jnp.int32))

    def run(self, *, picks=None, rows=True, order=None, count=None, queries=8, **pool):
        n = len(self.lengths)
        order = list(range(n)) if order is None else order
        arguments = (
            jnp.asarray(self.q),
            jnp.asarray(self.local_bytes),
            jnp.asarray(self.first),
            jnp.asarray(self.sink),
            jnp.asarray(order, jnp.int32),
            jnp.asarray(n if count is None else count, jnp.int32),
            self.pooled(**pool) if rows else None,
            jnp.asarray(self.visible) if rows else None,
            None if picks is None else jnp.asarray(picks, jnp.int32),
        )
        with checked():
            return np.asarray(compiled_packed(self.local_format, queries)(*arguments))

    def check(self, *, picks=None, rows=True, **options):
        got = self.run(picks=picks, rows=rows, **options)
        expected = self.expected(picks, rows)
        np.testing.assert_allclose(got, expected, atol=TOLERANCE, rtol=TOLERANCE)
        return got


SIZE = {"columns": 17, "blocks": 50}
"""Of all pools but one, so that few kernels are compiled."""


@pytest.mark.parametrize("lengths", [(0, 1, 31, 32), (33, 65, 7, 130)], ids=str)
def test_any_numbers_of_rows_match_float64(lengths):
    """One item and up to three, whose second key block is whole, short, or not there."""
    Packed(lengths, first=(60, 0, 3, 2)).check(**SIZE)


def test_no_byte_but_those_of_seen_rows_changes_a_bit():
    """Codes and scales of 0xFF are NaN; so are window rows before the first position."""
    batch = Packed((37, 0, 97, 5), first=(60, 2, 1, 90))
    expected = batch.run(**SIZE)
    assert np.isfinite(expected).all()
    for row, first in enumerate(batch.first):
        batch.local_bytes[row, : max(WINDOW - 1 - first, 0)] = 0xFF
    np.testing.assert_array_equal(batch.run(**SIZE, seed=3, fill=0x7F), expected)
    idle = batch.run(**SIZE, order=[2, 0, 3, 1], count=2)
    np.testing.assert_array_equal(idle[[2, 0]], expected[[2, 0]])
    assert not idle[[1, 3]].any()
    batch.visible[:] = 0
    unseen = batch.run(**SIZE)
    np.testing.assert_array_equal(unseen[1], expected[1])
    assert (unseen[0] != expected[0]).any()


def test_a_row_with_a_nan_scale_or_code_is_nan_where_it_is_seen():
    batch = Packed((40, 40, 40, 40))
    clean = batch.run(**SIZE)
    for sequence, byte in ((0, LAYOUT.scales.start), (2, 3)):
        rows = batch.rows[sequence].copy()
        rows[20, byte if byte < LAYOUT.coded else 0] = np.nan
        batch.rows[sequence] = rows
    got = batch.run(**SIZE)
    assert np.isnan(got[[0, 2]]).all()
    np.testing.assert_array_equal(got[[1, 3]], clean[[1, 3]])


def test_only_picked_rows_are_attended():
    batch = Packed((47, 0, 130, 3), first=(90, 0, 60, 20))
    batch.check(picks=picked(batch, 40), **SIZE)


def test_chunks_of_queries_of_wider_stored_rows_match_float64():
    """A tile, blocks of whole registers, and rows that are filled up with what is not read."""
    batch = Packed((70, 3), t=6, first=(70, 0), local_format="bfloat16")
    batch.check(per=32, columns=3, blocks=6, stored=256, queries=3)


def shapes(*, per=8, stored=LAYOUT.row_bytes, dtype=jnp.uint8):
    def of(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype)

    n, local = 2, of(2, WINDOW, LAYOUT.row_bytes, dtype=jnp.uint8)
    rows = BlockRows(of(9, per, stored, dtype=dtype), of(n, 4, dtype=jnp.int32))
    integers = [of(*shape, dtype=jnp.int32) for shape in ((n,), (n,), (), (n, 1))]
    first, order, count, visible = integers
    return of(n, 1, HEADS, WIDTH), local, first, of(HEADS), order, count, rows, visible, None


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"per": 2}, "rows a block must be 4, 8, 16 or a multiple of 32"),
        ({"per": 24}, "rows a block must be 4, 8, 16 or a multiple of 32"),
        ({"stored": 196}, "200 bytes a row"),
        ({"dtype": jnp.uint16}, "200 bytes a row"),
    ],
)
def test_what_is_not_supported_is_refused_before_anything_is_traced(options, reason):
    with pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(compiled_packed(LAYOUT), *shapes(**options))


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        (RowLayout("fp4_e4m3", 128), "use fp8_rope16 or fp8_block32"),
        (RowLayout("fp8_rope16", 192, 64), "a multiple of 128"),
        (RowLayout("fp8_rope16", 256, 128), "at most 64"),
        (RowLayout("fp8_block32", 128 * 33), "one register of bytes"),
        (RowLayout("fp8_rope16", 256, 62), "no half of a register"),
    ],
    ids=str,
)
def test_layouts_that_are_not_decoded_have_a_reason(layout, reason):
    assert reason in tpu_rows.refusal(layout)

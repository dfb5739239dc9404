"""The TPU kernel of ``pool_cells``, interpreted, against float64 and, bit for bit, itself."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_compression import as_earlier, cells, expected

from pallas_kernels.compression import tpu
from pallas_kernels.interpreting import checked

WIDTH = 128

QUICK = {"xla_backend_optimization_level": 0}
"""Compiling the interpreter is most of the time."""


@functools.cache
def compiled(mapped: bool):
    """A new function each time: traces are kept by function."""
    return jax.jit(
        lambda *cells: (jax.vmap(tpu.pool_cells) if mapped else tpu.pool_cells)(*cells),
        compiler_options=QUICK,
    )


def pool(kv, gate, earlier=None, mapped=False):
    with checked():
        got = np.asarray(compiled(mapped)(jnp.asarray(kv), jnp.asarray(gate), earlier))
    return got


@pytest.mark.parametrize(("count", "ratio"), [(8, 2), (16, 4), (24, 7), (1, 8), (3, 128), (8, 16)])
@pytest.mark.parametrize("gates", [2.0, 300.0])
def test_cells_without_overlap_match_float64(count, ratio, gates):
    kv, gate = cells(ratio, count, ratio, 2 * WIDTH, gates=gates)
    np.testing.assert_allclose(pool(kv, gate), expected(kv, gate), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize(("count", "ratio"), [(8, 2), (8, 4), (40, 4)])
def test_cells_with_overlap_match_float64(count, ratio, exists):
    kv, gate = cells(1, count, ratio, 4 * WIDTH)
    before = cells(2, ratio, 2 * WIDTH)
    got = pool(kv, gate, as_earlier(before, exists))
    wanted = expected(kv, gate, before if exists else None, 2 * WIDTH)
    np.testing.assert_allclose(got, wanted, atol=1e-6, rtol=1e-5)


def test_the_first_cell_of_a_sequence_reads_nothing_earlier():
    kv, gate = cells(1, 8, 4, 2 * WIDTH)
    empty = pool(kv, gate, as_earlier(cells(2, 4, WIDTH), False))
    nan = np.full((2, 4, WIDTH), np.nan, np.float32)
    np.testing.assert_array_equal(pool(kv, gate, as_earlier(nan, False)), empty)


def test_resuming_at_any_step_gives_the_rows_of_one_pass(monkeypatch):
    """One grid step of 24 cells, three of 8 with a carry, and a resumed pass: the same bits."""
    kv, gate = cells(3, 24, 4, 2 * WIDTH)
    nothing = as_earlier(cells(4, 4, WIDTH), False)
    whole = pool(kv, gate, nothing)
    left = as_earlier((kv[7, :, :WIDTH], gate[7, :, :WIDTH]), True)
    np.testing.assert_array_equal(pool(kv[8:], gate[8:], left), whole[8:])
    monkeypatch.setattr(tpu, "_BLOCK_BYTES", 8 * 4 * WIDTH * 4)
    compiled.cache_clear()
    np.testing.assert_array_equal(pool(kv, gate, nothing), whole)
    compiled.cache_clear()


def test_sequences_side_by_side_give_what_each_gives_alone():
    kv, gate = cells(5, 3, 8, 4, 2 * WIDTH)
    before = cells(6, 3, 4, WIDTH)
    exists = [True, False, True]
    got = pool(kv, gate, as_earlier(before, np.array(exists)), mapped=True)
    for i in range(3):
        alone = pool(kv[i], gate[i], as_earlier((before[0][i], before[1][i]), exists[i]))
        np.testing.assert_array_equal(got[i], alone, err_msg=str(i))


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((8, 4, 96), "96 channels"),
        ((1, 4, 128), "1 cells of 4 tokens"),
        ((8, 12, 128), "12 tokens"),
    ],
)
def test_what_is_not_supported_is_said_before_anything_runs(shape, reason):
    tokens = jax.ShapeDtypeStruct(shape, jnp.float32)
    with pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(functools.partial(tpu.pool_cells, earlier=None), tokens, tokens)

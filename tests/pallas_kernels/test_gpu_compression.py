"""The GPU kernel of ``pool_cells``, interpreted, against float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.compression.api import Earlier
from pallas_kernels.compression.gpu import pool_cells
from pallas_kernels.interpreting import interpreted


def cells(seed, *shape, gates=2.0):
    rng = np.random.default_rng(seed)
    return (
        rng.normal(size=shape).astype(np.float32),
        rng.normal(size=shape).astype(np.float32) * np.float32(gates),
    )


def pool(kv, gate, before=None, exists=True):
    earlier = None
    if before is not None:
        earlier = Earlier(jnp.asarray(before[0]), jnp.asarray(before[1]), jnp.asarray(exists))
    with interpreted(True):
        got = pool_cells(jnp.asarray(kv), jnp.asarray(gate), earlier)
    assert got.dtype == jnp.float32
    return np.asarray(got)


def expected(kv, gate, before=None, width=None):
    """Cell by cell in float64; ``width`` says that the first channels go to the next cell."""
    out = []
    for i in range(len(kv)):
        some_kv, some_gate = [kv[i][:, width:]], [gate[i][:, width:]]
        if width is not None and i > 0:
            some_kv.append(kv[i - 1][:, :width])
            some_gate.append(gate[i - 1][:, :width])
        elif before is not None:
            some_kv.append(before[0])
            some_gate.append(before[1])
        values = np.concatenate(some_kv).astype(np.float64)
        weights = np.concatenate(some_gate).astype(np.float64)
        weights = np.exp(weights - weights.max(0))
        out.append((weights * values).sum(0) / weights.sum(0))
    return np.asarray(out)


@pytest.mark.parametrize(("ratio", "width"), [(3, 100), (128, 8)])
@pytest.mark.parametrize("gates", [0.1, 300.0])
def test_cells_without_overlap_match_float64(ratio, width, gates):
    kv, gate = cells(ratio, 3, ratio, width, gates=gates)
    np.testing.assert_allclose(pool(kv, gate), expected(kv, gate), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("exists", [False, True])
def test_cells_with_overlap_match_float64(count, exists):
    kv, gate = cells(1, count, 4, 140)
    before = cells(2, 4, 70)
    got = pool(kv, gate, before, exists)
    exact = expected(kv, gate, before if exists else None, 70)
    np.testing.assert_allclose(got, exact, atol=1e-6, rtol=1e-5)


def test_the_first_cell_of_a_sequence_reads_nothing_earlier():
    kv, gate = cells(1, 3, 4, 12)
    empty = pool(kv, gate, cells(2, 4, 6), False)
    nan = np.full((2, 4, 6), np.nan, np.float32)
    np.testing.assert_array_equal(pool(kv, gate, nan, False), empty)


def test_resuming_at_any_cell_gives_the_bits_of_one_pass():
    kv, gate = cells(3, 4, 4, 12)
    whole = pool(kv, gate, cells(4, 4, 6), False)
    for cut in range(1, 4):
        left = (kv[cut - 1, :, :6], gate[cut - 1, :, :6])
        np.testing.assert_array_equal(pool(kv[cut:], gate[cut:], left), whole[cut:])


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        ((2, 4, 8), jnp.bfloat16, "float32"),
        ((0, 4, 8), jnp.float32, "no cell"),
        ((1, 512, 8), jnp.float32, "at most 256"),
    ],
)
def test_what_it_cannot_do_is_refused_with_the_reason(shape, dtype, reason):
    with pytest.raises(NotImplementedError, match=reason):
        pool_cells(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), None)

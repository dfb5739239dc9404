"""``pool_cells`` against a loop over slots in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.compression.api import Earlier, pool_cells

pool = jax.jit(pool_cells)


def cells(seed: int, *shape: int, gates: float = 2.0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    kv, gate = rng.normal(size=(2, *shape))
    return kv.astype(np.float32), (gate * gates).astype(np.float32)


def expected(kv, gate, earlier=None, width=None) -> np.ndarray:
    """Channel by channel over the slots each cell pools; ``earlier`` is (kv, gate) or None."""
    width = width or kv.shape[-1]
    overlap = kv.shape[-1] == 2 * width
    out = []
    for number in range(len(kv)):
        values, logits = list(kv[number, :, -width:]), list(gate[number, :, -width:])
        if overlap and number:
            values += list(kv[number - 1, :, :width])
            logits += list(gate[number - 1, :, :width])
        elif overlap and earlier is not None:
            values, logits = values + list(earlier[0]), logits + list(earlier[1])
        values, logits = np.asarray(values, np.float64), np.asarray(logits, np.float64)
        weights = np.exp(logits - logits.max(axis=0))
        out.append((weights * values).sum(axis=0) / weights.sum(axis=0))
    return np.stack(out)


def as_earlier(pair, exists: bool) -> Earlier:
    return Earlier(jnp.asarray(pair[0]), jnp.asarray(pair[1]), jnp.asarray(exists))


@pytest.mark.parametrize("ratio", [2, 3, 16])
@pytest.mark.parametrize("gates", [0.1, 2.0, 300.0])
def test_cells_without_overlap_match_float64(ratio, gates):
    kv, gate = cells(ratio, 5, ratio, 6, gates=gates)
    np.testing.assert_allclose(
        pool(jnp.asarray(kv), jnp.asarray(gate), None), expected(kv, gate), atol=1e-6, rtol=1e-5
    )


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("exists", [False, True])
def test_cells_with_overlap_match_float64(count, exists):
    kv, gate = cells(1, count, 4, 12)
    before = cells(2, 4, 6)
    got = pool(jnp.asarray(kv), jnp.asarray(gate), as_earlier(before, exists))
    np.testing.assert_allclose(
        got, expected(kv, gate, before if exists else None, 6), atol=1e-6, rtol=1e-5
    )


def test_the_first_cell_of_a_sequence_reads_nothing_earlier():
    kv, gate = (jnp.asarray(x) for x in cells(1, 3, 4, 12))
    empty = pool(kv, gate, as_earlier(cells(2, 4, 6), False))
    nan = np.full((2, 4, 6), np.nan, np.float32)
    np.testing.assert_array_equal(pool(kv, gate, as_earlier(nan, False)), empty)


def test_the_first_half_of_the_channels_goes_to_the_next_cell():
    kv, gate = cells(1, 3, 4, 12)
    before = as_earlier(cells(2, 4, 6), True)
    base = np.asarray(pool(jnp.asarray(kv), jnp.asarray(gate), before))
    for half, changed in ((slice(0, 6), [2]), (slice(6, 12), [1])):
        other = kv.copy()
        other[1, :, half] += 1
        got = np.asarray(pool(jnp.asarray(other), jnp.asarray(gate), before))
        assert [i for i in range(3) if (got[i] != base[i]).any()] == changed


def test_resuming_at_any_cell_gives_the_rows_of_one_pass():
    kv, gate = cells(3, 6, 4, 12)
    nothing = as_earlier(cells(4, 4, 6), False)
    whole = np.asarray(pool(jnp.asarray(kv), jnp.asarray(gate), nothing))
    for cut in range(1, 6):
        left = as_earlier((kv[cut - 1, :, :6], gate[cut - 1, :, :6]), True)
        got = pool(jnp.asarray(kv[cut:]), jnp.asarray(gate[cut:]), left)
        np.testing.assert_array_equal(got, whole[cut:], err_msg=str(cut))

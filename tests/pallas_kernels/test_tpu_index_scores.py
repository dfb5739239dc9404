"""The TPU kernel of ``pick_rows``, interpreted, against a dense ranking in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.blocks import BlockRows
from pallas_kernels.index_scores import tpu
from pallas_kernels.index_scores.api import NO_ROW
from pallas_kernels.interpreting import checked
from pallas_kernels.sequences import Active
from pallas_kernels.tuning.table import trying

N, T, HEADS, WIDTH, PER, TOPK = 3, 2, 3, 128, 16, 20
BLOCKS, DEPTH = 200, 3
"""Blocks of a sequence, and buffers: 3,200 rows are more chunks of 1,024 than buffers."""


@pytest.fixture(autouse=True)
def few_buffers():
    with trying("index_scores/tpu", depth=DEPTH):
        yield


QUICK = {"xla_backend_optimization_level": 0}
"""Compiling the interpreter is most of the time."""


@functools.cache
def compiled(topk: int, format: str, key_block: int = 128):
    def run(queries, weights, pool, table, visible, order, count):
        rows = BlockRows(pool, table)
        active = Active(order, count)
        return tpu.pick_rows(
            queries,
            weights,
            rows,
            visible,
            active=active,
            topk=topk,
            key_block=key_block,
            format=format,
        )

    return jax.jit(run, compiler_options=QUICK)


def picked(case, *, topk=TOPK, format="bfloat16", order=None, count=None, key_block=128):
    """The kernel's picks; no two of its copies may race."""
    queries, weights, pool, table, visible = case
    n = len(queries)
    order = np.arange(n) if order is None else order
    with checked():
        got = compiled(topk, format, key_block)(
            *(jnp.asarray(x, jnp.float32) for x in (queries, weights)),
            stored(pool, format),
            *(jnp.asarray(x, jnp.int32) for x in (table, visible, order)),
            jnp.asarray(n if count is None else count, jnp.int32),
        )
        got = np.asarray(got)
    return got


def stored(pool, format):
    if format == "float32":
        return jnp.asarray(pool)
    return jax.lax.bitcast_convert_type(jnp.asarray(pool).astype(jnp.bfloat16), jnp.uint16)


def placed(rows, visible, *, blocks=BLOCKS, pool=None, seed=0, fill=np.nan, per=PER):
    """Rows of each sequence in random blocks. All other bytes, and all other table entries, are
    what no result may depend on.
    """
    rng = np.random.default_rng(seed)
    n, _, width = rows.shape
    pool = pool or n * blocks
    free = iter(rng.permutation(pool))
    data = np.full((pool, per, width), fill, np.float32)
    table = rng.integers(-(2**31), 2**31 - 1, (n, blocks)).astype(np.int32)
    for i in range(n):
        for row in range(visible[i, -1]):
            if row % per == 0:
                table[i, row // per] = next(free)
            data[table[i, row // per], row % per] = rows[i, row]
    return data, table


def integers(visible, seed=0, n=N, t=T):
    """Scores with ties everywhere, exact in every arithmetic."""
    rng = np.random.default_rng(seed)
    queries = rng.integers(-2, 3, (n, t, HEADS, WIDTH)).astype(np.float32)
    weights = rng.integers(-1, 2, (n, t, HEADS)).astype(np.float32)
    rows = rng.integers(-1, 2, (n, np.max(visible) + 1, WIDTH)).astype(np.float32)
    rows[..., 5:] = 0
    return queries, weights, rows


def scores_of(queries, weights, rows):
    hits = np.maximum(np.einsum("thc,sc->ths", queries.astype(float), rows.astype(float)), 0)
    return np.einsum("ths,th->ts", hits, weights.astype(float))


def ranked(queries, weights, rows, visible, topk=TOPK):
    out = np.full((*queries.shape[:2], topk), NO_ROW, np.int64)
    for i in range(len(queries)):
        scores = scores_of(queries[i], weights[i], rows[i])
        for j, count in enumerate(visible[i]):
            best = np.argsort(-scores[j, :count], kind="stable")[:topk]
            out[i, j, : len(best)] = np.sort(best)
    return out


LENGTHS = [
    [[0, 0], [0, 1], [19, 20]],
    [[20, 21], [21, 22], [0, 1120]],
    [[1023, 1024], [1024, 1025], [3071, 3073]],
    [[2047, 2049], [16, 17], [3199, 3200]],
]


@pytest.mark.parametrize("visible", LENGTHS)
def test_picks_are_the_best_rows_with_ties_to_the_lowest(visible):
    visible = np.array(visible)
    queries, weights, rows = integers(visible)
    got = picked((queries, weights, *placed(rows, visible), visible))
    np.testing.assert_array_equal(got, ranked(queries, weights, rows, visible))


def test_key_blocks_that_are_no_power_of_two_give_the_same_picks():
    visible = np.array([[4300]])  # 640 * 8 rows are 5 tiles, which are scored 4 at a time
    queries, weights, rows = integers(visible, n=1, t=1)
    case = (queries, weights, *placed(rows, visible, blocks=320), visible)
    got = picked(case, key_block=640)
    np.testing.assert_array_equal(got, ranked(queries, weights, rows, visible))


@pytest.mark.parametrize("key_block", [1, 128, 384, 640, 1024, 1920, 2560, 3000, 6000])
@pytest.mark.parametrize("blocks", [1, 1024, 1025])
def test_chunks_divide_into_steps_of_tiles_and_memory_into_chunks(key_block, blocks):
    rows = BlockRows(
        jax.ShapeDtypeStruct((9, PER, WIDTH), jnp.uint16),
        jax.ShapeDtypeStruct((1, blocks), jnp.int32),
    )
    queries = jax.ShapeDtypeStruct((1, 1, HEADS, WIDTH), jnp.float32)
    sizes = tpu._sizes(queries, rows, TOPK, key_block, "bfloat16")
    chunk = sizes.chunk_blocks * PER
    tiles = chunk // tpu.TILE
    assert chunk % tpu.TILE == 0
    assert tiles % min(tiles, 4) == 0  # see tpu_scores.score_chunk
    assert sizes.capacity % chunk == sizes.capacity % tpu.CHUNK == 0
    assert sizes.capacity >= blocks * PER


def test_float_queries_of_bfloat16_rows_are_multiplied_exactly():
    """Near 256, bfloat16 queries are all alike: only the second and third summands tell rows."""
    rng = np.random.default_rng(3)
    visible = np.array([[600, 601], [40, 1100], [21, 22]])
    queries = 256 + rng.integers(-127, 128, (N, T, HEADS, WIDTH)) * 2.0**-8
    queries[1] = 256.5 + rng.integers(-7, 8, (T, HEADS, WIDTH)) * 2.0**-14
    weights = rng.integers(1, 3, (N, T, HEADS)).astype(np.float32)
    half = rng.integers(-1, 2, (N, 1100, WIDTH // 2)) * (np.arange(WIDTH // 2) < 2)
    rows = np.concatenate([half, -half], axis=-1).astype(np.float32)
    case = (queries.astype(np.float32), weights, rows)
    got = picked((*case[:2], *placed(rows, visible), visible))
    np.testing.assert_array_equal(got, ranked(*case, visible))


def test_float32_rows_are_multiplied_as_float32():
    visible = np.array([[37], [1030]])
    rng = np.random.default_rng(1)
    queries = rng.normal(size=(2, 1, HEADS, WIDTH)).astype(np.float32)
    weights = rng.normal(size=(2, 1, HEADS)).astype(np.float32)
    rows = rng.normal(size=(2, 1030, WIDTH)).astype(np.float32)
    data, table = placed(rows, visible, blocks=130, per=8)
    got = picked((queries, weights, data, table, visible), topk=33, format="float32")
    np.testing.assert_array_equal(got, ranked(queries, weights, rows, visible, 33))


@pytest.mark.parametrize("weight", [1.0, -1.0])
def test_scores_that_are_all_zero_pick_the_lowest_rows(weight):
    """Relu zero times a negative weight is -0.0, and a row of zeros gives 0.0."""
    visible = np.array([[30, 31], [700, 1100], [25, 25]])
    queries, weights, rows = integers(visible)
    queries[:], weights[:] = -1, weight
    rows = np.abs(rows)
    got = picked((queries, weights, *placed(rows, visible), visible))
    np.testing.assert_array_equal(got, np.broadcast_to(np.arange(TOPK), got.shape))


def test_capacity_neighbours_order_and_stale_bytes_change_no_pick():
    visible = np.array([[1500, 1501], [30, 31], [2050, 2051]])
    queries, weights, rows = integers(visible, seed=4)
    queries += np.random.default_rng(0).normal(size=queries.shape).astype(np.float32)
    case = (queries, weights, *placed(rows, visible), visible)
    alone = picked(case)
    moved = placed(rows, visible, seed=9, fill=np.inf, pool=N * BLOCKS)
    np.testing.assert_array_equal(picked((queries, weights, *moved, visible)), alone)
    larger = placed(rows, visible, blocks=1100, pool=3400, seed=2)
    np.testing.assert_array_equal(picked((queries, weights, *larger, visible)), alone)
    turned = picked(case, order=np.array([2, 0, 1]))
    np.testing.assert_array_equal(turned, alone)
    others = np.array([[0, 0], [30, 31], [3, 4]])
    few = picked((queries, weights, *placed(rows, visible), others))
    np.testing.assert_array_equal(few[1], alone[1])


@pytest.mark.parametrize("count", [0, 1])
def test_idle_sequences_give_zeros_and_are_not_read(count):
    visible = np.array([[500, 501], [30, 31], [1050, 1051]])
    queries, weights, rows = integers(visible)
    data, table = placed(rows, visible)
    order = np.array([1, 2, 0])
    got = picked((queries, weights, data, table, visible), order=order, count=count)
    expected = ranked(queries, weights, rows, visible)
    expected[order[count:]] = 0
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"width": 96}, "channels"),
        ({"per": 24}, "blocks of 24 rows"),
        ({"format": "fp8_index"}, "format 'fp8_index'"),
        ({"blocks": 2**16}, "VMEM"),
    ],
)
def test_what_is_not_supported_is_said_before_anything_runs(changed, reason):
    size = {"width": 128, "per": 32, "format": "bfloat16", "blocks": 8} | changed
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    pool = jax.ShapeDtypeStruct((8, size["per"], size["width"]), jnp.uint16)
    table = jax.ShapeDtypeStruct((2, size["blocks"]), jnp.int32)
    visible = jax.ShapeDtypeStruct((2, 8), jnp.int32)
    run = functools.partial(
        tpu.pick_rows, active=Active.all(2), topk=4, key_block=512, format=size["format"]
    )
    with pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(
            run,
            shape((2, 8, 4, size["width"])),
            shape((2, 8, 4)),
            BlockRows(pool, table),
            visible,
        )

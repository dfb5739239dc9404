"""The TPU kernel of ``pick_rows`` over packed rows, interpreted, against a float64 ranking."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_tpu_index_scores import HEADS, QUICK, TOPK, WIDTH, ranked

from pallas_kernels.blocks import BlockRows
from pallas_kernels.index_scores import tpu, tpu_packed
from pallas_kernels.interpreting import checked
from pallas_kernels.packing import reference
from pallas_kernels.packing.layout import RowLayout
from pallas_kernels.sequences import Active
from pallas_kernels.tuning.table import trying

PER, BLOCKS, POOL = 32, 72, 150
ROWS = 2100
LAYOUTS = {name: RowLayout(name, WIDTH) for name in ("mxfp4", "fp8_index")}
every_layout = pytest.mark.parametrize("name", list(LAYOUTS))


@pytest.fixture(autouse=True)
def few_buffers():
    with trying("index_scores/tpu", depth=2):
        yield


@functools.cache
def compiled(name):
    def run(queries, weights, pool, table, visible, order, count):
        return tpu.pick_rows(
            queries,
            weights,
            BlockRows(pool, table),
            visible,
            active=Active(order, count),
            topk=TOPK,
            key_block=128,
            format=LAYOUTS[name],
        )

    return jax.jit(run, compiler_options=QUICK)


@functools.cache
def packing(operation, name):
    return jax.jit(functools.partial(operation, format=LAYOUTS[name]))


class Case:
    """Scores with ties everywhere, exact in every arithmetic; rows of many scales."""

    def __init__(self, name, visible, seed=0):
        rng = np.random.default_rng(seed)
        self.name, self.visible = name, np.asarray(visible)
        n, t = self.visible.shape
        self.queries = rng.integers(-2, 3, (n, t, HEADS, WIDTH)).astype(np.float32)
        self.weights = rng.integers(-1, 2, (n, t, HEADS)).astype(np.float32)
        rows = rng.integers(-1, 2, (n, ROWS, WIDTH)).astype(np.float32)
        rows[..., 6:] = 0
        rows[..., -1] = rng.integers(-1, 2, rows.shape[:-1])
        scales = 2.0 ** rng.integers(0, 3, (*rows.shape[:-1], 1))
        self.rows = (rows * 448 * scales).astype(np.float32)

    def bytes(self):
        return np.array(packing(reference.encode, self.name)(self.rows))

    def decoded(self):
        return np.array(packing(reference.decode, self.name)(self.bytes()))

    def placed(self, seed=0, fill=0xFF):
        """Everything else in the pool is ``fill``: 0xFF are NaN scales and NaN codes."""
        rng = np.random.default_rng(seed)
        free = iter(rng.permutation(POOL))
        pool = np.full((POOL, PER, LAYOUTS[self.name].row_bytes), fill, np.uint8)
        table = rng.integers(-(2**31), 2**31 - 1, (len(self.rows), BLOCKS)).astype(np.int32)
        for i, rows in enumerate(self.bytes()):
            for row in range(self.visible[i, -1]):
                if row % PER == 0:
                    table[i, row // PER] = next(free)
                pool[table[i, row // PER], row % PER] = rows[row]
        return pool, table

    def picked(self, order=None, count=None, **placed):
        n = len(self.queries)
        pool, table = self.placed(**placed)
        order = np.arange(n) if order is None else order
        with checked():
            return np.asarray(
                compiled(self.name)(
                    jnp.asarray(self.queries),
                    jnp.asarray(self.weights),
                    jnp.asarray(pool),
                    jnp.asarray(table),
                    jnp.asarray(self.visible, jnp.int32),
                    jnp.asarray(order, jnp.int32),
                    jnp.asarray(n if count is None else count, jnp.int32),
                )
            )

    def expected(self):
        return ranked(self.queries, self.weights, self.decoded(), self.visible)


@every_layout
@pytest.mark.parametrize("visible", [[[21, 33], [0, 1025]], [[2047, 2049], [TOPK, 1024]]], ids=str)
def test_picks_are_the_best_rows_with_ties_to_the_lowest(name, visible):
    case = Case(name, visible)
    np.testing.assert_array_equal(case.picked(), case.expected())


@every_layout
def test_float_queries_are_multiplied_exactly(name):
    """Near 256 bfloat16 queries are all alike: only the second and third summands tell rows."""
    case = Case(name, [[40, 41], [0, 1025]], seed=3)
    rng = np.random.default_rng(3)
    case.queries = (256 + rng.integers(-127, 128, case.queries.shape) * 2.0**-8).astype(np.float32)
    case.weights[:] = 1
    case.rows[:] = 0
    one = rng.integers(1, 4, case.rows.shape[:2]) % 2 * 448.0
    case.rows[..., 0], case.rows[..., 1] = one, -one
    np.testing.assert_array_equal(case.picked(), case.expected())


@every_layout
def test_no_byte_but_those_of_visible_rows_changes_a_pick(name):
    """Codes and scales of 0xFF are NaN. Idle sequences give zeros."""
    case = Case(name, [[700, 1100], [22, 1025]], seed=4)
    expected = case.picked()
    np.testing.assert_array_equal(expected, case.expected())
    np.testing.assert_array_equal(case.picked(seed=9, fill=0x7F, order=np.array([1, 0])), expected)
    idle = case.picked(order=np.array([1, 0]), count=1)
    np.testing.assert_array_equal(idle[1], expected[1])
    assert not idle[0].any()


@pytest.mark.parametrize(
    ("name", "byte"), [("mxfp4", 65), ("fp8_index", 3), ("fp8_index", 70), ("fp8_index", 131)]
)
def test_a_row_that_is_nan_spoils_no_other(name, byte):
    """Of a scale or a code. The row itself is above all others or below them."""
    case, row = Case(name, [[0, 0], [40, 41]], seed=5), 7
    case.weights[:] = 1
    visible = np.array([[0, 0], [39, 40]])
    others = ranked(case.queries, case.weights, np.delete(case.decoded(), row, axis=1), visible)[1]
    others += others >= row
    stored = case.bytes()
    stored[1, row, byte] = 0xFF if byte != 131 else 0x7F
    stored[1, row, byte - 1] = 0xFF
    case.bytes = lambda: stored
    for got, best in zip(case.picked()[1], others, strict=True):
        without = got[got != row]
        assert set(without) <= set(best)
        assert len(without) >= TOPK - 1


def shapes(per=PER, stored=68, width=WIDTH):
    def of(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype)

    integers = [of(*shape, dtype=jnp.int32) for shape in ((2, 8), (2, 2), (2,), ())]
    pool = of(9, per, stored, dtype=jnp.uint8)
    return of(2, 2, HEADS, width), of(2, 2, HEADS), pool, *integers


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"per": 16}, "not a multiple of 32"),
        ({"stored": 64}, "queries of width 128"),
        ({"width": 64}, "queries of width 64"),
    ],
)
def test_what_is_not_supported_is_refused_before_anything_is_traced(options, reason):
    with pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(compiled("mxfp4"), *shapes(**options))


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        (RowLayout("fp8_rope16", 128, 64), "use mxfp4 or fp8_index"),
        (RowLayout("mxfp4", 256), "it must be 128"),
    ],
    ids=str,
)
def test_layouts_that_are_not_scored_have_a_reason(layout, reason):
    assert reason in tpu_packed.refusal(layout)

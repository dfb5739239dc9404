"""The GPU kernels of ``pick_rows``, interpreted, against a dense ranking, with ties everywhere."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_bounds import watch
from gpu_cases import active, batched, halves

from pallas_kernels.index_scores import gpu, gpu_kernel, gpu_rows
from pallas_kernels.index_scores.gpu_kernel import COUNTED, SCORED, ordered
from pallas_kernels.interpreting import interpreted
from pallas_kernels.packing import reference
from pallas_kernels.packing.layout import RowLayout

HEADS, WIDTH, NO_ROW, STEP = 3, 16, 2**31 - 1, 16


@functools.cache
def compiled(topk: int, key_block: int, format: str):
    def function(queries, weights, rows, visible, active):
        options = {"topk": topk, "key_block": key_block, "format": format}
        return gpu.pick_rows(queries, weights, rows, visible, active=active, **options)

    return jax.jit(function)


PACKED = {"mxfp4": RowLayout("mxfp4", 64), "fp8_index": RowLayout("fp8_index", 64)}


QUICK = {"xla_backend_optimization_level": 0}
encode = jax.jit(reference.encode, static_argnums=1, compiler_options=QUICK)
decode = jax.jit(reference.decode, static_argnums=1, compiler_options=QUICK)


def pool_of(rows, format, **pool):
    """Packed rows decode to what they are here; rows of no sequence are NaN."""
    if not isinstance(format, RowLayout):
        return batched(rows, format=format, **pool)
    plain = batched(rows, **pool)
    return plain._replace(pool=encode(plain.pool, format))


class Case:
    """Small integers, so that scores are exact and often equal."""

    def __init__(self, lengths, *, t=1, seed=0, width=WIDTH):
        rng = np.random.default_rng(seed)
        n = len(lengths)
        self.t = t
        self.queries = rng.integers(-2, 3, (n, t, HEADS, width)).astype(np.float32)
        self.weights = rng.integers(-2, 3, (n, t, HEADS)).astype(np.float32) / 2
        self.rows = [rng.integers(-1, 2, (length, width)).astype(np.float32) for length in lengths]
        back = np.arange(t)[::-1]
        self.visible = np.maximum(np.asarray(lengths)[:, None] - back, 0).astype(np.int32)

    def run(self, topk=5, *, which=None, key_block=STEP, format="float32", **pool):
        with interpreted(True), pytest.MonkeyPatch.context() as patch:
            if isinstance(format, RowLayout):  # it takes long to compile
                watch(patch, gpu_kernel, gpu_rows)
            got = compiled(topk, key_block, format)(
                jnp.asarray(self.queries),
                jnp.asarray(self.weights),
                pool_of(self.rows, format, **pool),
                jnp.asarray(self.visible),
                active(len(self.rows), which),
            )
        assert got.dtype == jnp.int32
        return np.asarray(got)

    def scores(self, sequence, query):
        products = self.queries[sequence, query].astype(np.float64) @ self.rows[sequence].T
        return self.weights[sequence, query].astype(np.float64) @ np.maximum(products, 0)

    def expected(self, topk=5):
        """One sort of all scores, lowest row first among equals."""
        out = np.full((*self.visible.shape, topk), NO_ROW, np.int64)
        for (i, query), count in np.ndenumerate(self.visible):
            scores = self.scores(i, query)
            best = sorted(range(count), key=lambda s, scores=scores: (-scores[s], s))[:topk]
            out[i, query, : len(best)] = sorted(best)
        return out

    def check(self, topk=5, **options):
        np.testing.assert_array_equal(self.run(topk, **options), self.expected(topk))


AWKWARD = (0, 1, 4, 5, 6, 3, 7, STEP - 1, STEP, STEP + 1, 33, 100)


@pytest.mark.parametrize(("topk", "format", "per"), [(5, "bfloat16", 3), (16, "float32", 1)])
def test_picks_are_the_best_rows_with_ties_to_the_lowest(topk, format, per):
    Case(AWKWARD).check(topk, format=format, per=per, places=100, blocks=300)


def test_many_queries_of_a_sequence_pick_their_own():
    Case([40, 0, 7], t=3).check()


@pytest.mark.parametrize("name", PACKED)
def test_packed_rows_are_picked_as_the_numbers_they_hold(name):
    """Codes, even and odd channels, and scales: of each row its own, in mxfp4 of each half."""
    layout = PACKED[name]
    case = Case([40, 5, 6, 0, 19], t=2, width=64)
    for rows in case.rows:
        if name == "fp8_index":  # the scale is a power of two, so that scores stay exact
            rows[:, -1] = 448
            rows *= 2.0 ** (np.arange(len(rows)) % 3)[:, None]
        else:
            rows[:, :32] *= 2.0 ** (np.arange(len(rows)) % 3)[:, None]
            rows[:, 32:] *= 6
    if name == "fp8_index":
        case.queries[..., -1] = 0
    everything = jnp.asarray(np.concatenate(case.rows))
    back = decode(encode(everything, layout), layout)
    np.testing.assert_array_equal(back, everything)
    for fill in (np.nan, 1.0):
        case.check(5, format=layout, per=3, places=60, blocks=90, fill=fill)


LARGE = {"blocks": 900, "places": 800}


def test_rows_of_many_ranges_are_picked_in_order():
    lengths = [SCORED - 1, SCORED, SCORED + 1, COUNTED, COUNTED + 1, 0]
    for some in ([*lengths[:3], 0], [*lengths[3:], 2]):
        Case(some).check(200, format="bfloat16", **LARGE)


def test_one_good_row_far_away_leaves_the_lowest_of_the_equal_ones():
    case = Case([COUNTED + 90, 20, 0, 0])
    case.queries[:], case.weights[:], case.rows[0][:] = 1, 1, 0
    case.rows[0][-1] = 1
    got = case.run(200, format="bfloat16", **LARGE)
    np.testing.assert_array_equal(got[0, 0], [*range(199), COUNTED + 89])


def test_negative_scores_lose_to_zero_and_zero_to_positive_ones():
    case = Case([6, 6])
    rows = np.array([-1, 2, -1, 0, 1, 3], np.float32)
    case.rows = [np.repeat(rows[:, None], WIDTH, axis=1)] * 2
    case.queries[:] = 1
    case.weights[0], case.weights[1] = -1, 1
    got = case.run(4)[:, 0]
    np.testing.assert_array_equal(got, [[0, 2, 3, 4], [0, 1, 4, 5]])


def test_the_order_of_the_bits_is_that_of_the_scores():
    scores = np.array([-np.inf, -3e38, -2.0, -1e-30, -0.0, 0.0, 1e-30, 1.0, 3e38, np.inf])
    bits = np.asarray(ordered(jnp.asarray(scores, jnp.float32))).view(np.uint32)
    assert bits[4] == bits[5]
    assert (np.diff(np.delete(bits, 4).astype(np.int64)) > 0).all()


def test_random_floats_rank_like_float64():
    case = Case([90, 61], t=2)
    rng = np.random.default_rng(2)
    case.queries = halves(rng.normal(size=case.queries.shape))
    case.rows = [halves(rng.normal(size=rows.shape)) for rows in case.rows]
    case.weights = rng.normal(size=case.weights.shape).astype(np.float32)
    for format in ("float32", "bfloat16"):
        case.check(7, format=format)


@pytest.mark.parametrize("which", [[], [1], [2, 0]])
def test_idle_sequences_pick_nothing_and_the_others_what_they_did(which):
    case = Case([40, 3, 17, 0])
    everything = case.run()
    got = case.run(which=which)
    for i in range(4):
        np.testing.assert_array_equal(got[i], everything[i] if i in which else NO_ROW)


def test_capacity_order_of_blocks_neighbours_and_stale_bytes_change_no_pick():
    case = Case([40, 3, STEP], t=2)
    expected = case.expected()
    for other in (
        {"blocks": 300, "places": 300},
        {"seed": 3},
        {"fill": np.inf},
        {"garbage": (0, 1, 2)},
    ):
        np.testing.assert_array_equal(case.run(**other), expected, err_msg=str(other))
    alone = Case([3], t=2)
    alone.queries, alone.weights = case.queries[1:2], case.weights[1:2]
    alone.rows, alone.visible = case.rows[1:2], case.visible[1:2]
    np.testing.assert_array_equal(alone.run(), expected[1:2])


def test_the_key_block_changes_no_pick():
    Case([40, 90]).check(key_block=100)


@pytest.mark.parametrize("limit", [2, 4], ids=["part of a sequence", "one sequence"])
def test_queries_that_wait_for_each_other_pick_the_same(limit, monkeypatch):
    case = Case([40, 0, 7], t=4)
    monkeypatch.setattr(gpu, "SCORES", limit * COUNTED)
    compiled.cache_clear()
    case.check()
    compiled.cache_clear()


@pytest.mark.parametrize(
    ("width", "heads", "format", "reason"),
    [
        (WIDTH, HEADS, "mxfp4", "mxfp4"),
        (WIDTH, HEADS, RowLayout("mxfp4", WIDTH), "no whole number of scaled groups"),
        (256, HEADS, RowLayout("fp8_index", 256), "several float32 scales"),
        (WIDTH, HEADS, RowLayout("fp8_block32", WIDTH), "fp8_block32"),
        (48, HEADS, "float32", "power of two"),
        (WIDTH, 129, "float32", "at most 128"),
    ],
)
def test_what_it_cannot_do_is_refused_with_the_reason(width, heads, format, reason):
    with pytest.raises(NotImplementedError, match=reason):
        gpu.pick_rows(
            jnp.zeros((1, 1, heads, width)),
            jnp.zeros((1, 1, heads)),
            batched([np.zeros((1, width))]),
            jnp.zeros((1, 1), jnp.int32),
            active=active(1),
            topk=2,
            format=format,
        )

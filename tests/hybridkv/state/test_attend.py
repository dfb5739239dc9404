"""``Attend`` against dense attention in float64, and what a step may and may not touch."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybridkv import formats
from hybridkv.errors import UserError
from hybridkv.geometry import Geometry, LayerGeometry
from hybridkv.state.attend import Attend
from hybridkv.state.batch import DecodeBatch, StepOptions, TileBatch
from hybridkv.state.cache import Cache, assign_in_order
from hybridkv.state.capacity import Capacity
from hybridkv.state.tokens import Tokens
from pallas_kernels.packing import api as packing
from pallas_kernels.packing.layout import RowLayout

HEADS, KV_HEADS, WIDTH, WINDOW, TILE, TOTAL = 4, 2, 4, 5, 8, 37
LAYERS = (
    LayerGeometry(window=WINDOW),
    LayerGeometry(ratio=1),
    LayerGeometry(ratio=1, rows_of=1),
)
GEOMETRY = Geometry(layers=LAYERS, row_width=2 * KV_HEADS * WIDTH, cells_per_block=4)
OPTIONS = StepOptions(tile=TILE, lanes=1, key_block=8, sequential=True)
SLOTS = 3


class Case:
    """One sequence's queries, keys and values of every layer, and steps over a cache."""

    def __init__(self, geometry=GEOMETRY, seed=0):
        rng = np.random.default_rng(seed)
        self.geometry = geometry
        shape = (len(geometry.layers), TOTAL)
        self.q = rng.normal(size=(*shape, HEADS, WIDTH)).astype(np.float32)
        self.k, self.v = rng.normal(size=(2, *shape, KV_HEADS, WIDTH)).astype(np.float32)

    def cache(self, fill=0.0):
        """An empty cache whose every unused byte is ``fill``."""
        capacity = Capacity.for_tokens(self.geometry, tokens=40, slots=SLOTS)
        cache = assign_in_order(Cache.init(self.geometry, capacity))
        return dataclasses.replace(
            cache,
            compressed=jax.tree.map(lambda x: jnp.full_like(x, fill), cache.compressed),
            sequence=jax.tree.map(lambda x: jnp.full_like(x, fill), cache.sequence),
        )

    def tile(self, cache, start, end, *, slot=1, known_from=0, write_from=0, padding=np.nan):
        """Outputs ``[layers, end - start, heads, width]`` of one tile, and the cache after it."""
        q, k, v = (self._padded(x[:, start:end], padding) for x in (self.q, self.k, self.v))
        return self._step(tile_batch(slot, start, end, known_from, write_from), cache, q, k, v)

    def decode(self, cache, position, *, slot=1):
        """Outputs of one token in ``slot``; the other slots are idle and full of NaN."""
        one = (x[:, position : position + 1] for x in (self.q, self.k, self.v))
        q, k, v = (
            jnp.full((len(x), SLOTS, *x.shape[1:]), jnp.nan).at[:, slot].set(jnp.asarray(x))
            for x in one
        )
        active = jnp.arange(SLOTS, dtype=jnp.int32) == slot
        batch = DecodeBatch(tokens=jnp.zeros((SLOTS,), jnp.int32), active=active)
        out, cache = _decode(batch, cache, q, k, v)
        return np.asarray(out)[:, slot], cache

    def _padded(self, x, padding):
        full = np.full((len(x), 1, TILE, *x.shape[2:]), padding, np.float32)
        full[:, 0, : x.shape[1]] = x
        return jnp.asarray(full)

    def _step(self, batch, cache, q, k, v):
        count = int(batch.ends[0] - batch.starts[0])
        out, cache = _tile(batch, cache, q, k, v)
        return np.asarray(out)[:, 0, :count], cache

    def prefill(self, cache, end, start=0, **more):
        """All tiles of ``start ... end - 1``."""
        out = []
        for first in range(start, end, TILE):
            got, cache = self.tile(cache, first, min(first + TILE, end), **more)
            out.append(got)
        return np.concatenate(out, axis=1), cache

    def expected(self, start, end, *, known_from=0):
        """Query by query in float64."""
        out = np.zeros((len(LAYERS), end - start, HEADS, WIDTH))
        for number, at, head in np.ndindex(out.shape[:3]):
            form, position = self.geometry.layers[number], start + at
            owner, of = self.geometry.owner(number), head // (HEADS // KV_HEADS)
            first = max(position - form.window + 1, known_from) if form.window else 0
            keys, values = (
                x[owner, first : position + 1, of].astype(np.float64) for x in (self.k, self.v)
            )
            logits = keys @ self.q[number, position, head].astype(np.float64) * WIDTH**-0.5
            weights = np.exp(logits - logits.max())
            out[number, at, head] = weights @ values / weights.sum()
        return out


def tile_batch(slot, start, end, known_from=0, write_from=0):
    def lane(value):
        return jnp.full((1,), value, jnp.int32)

    return TileBatch(
        tokens=jnp.full((1, TILE), 9, jnp.int32),
        slots=lane(slot),
        starts=lane(start),
        ends=lane(end),
        known_from=lane(known_from),
        write_from=lane(write_from),
    )


def layers_of(tokens, cache, q, k, v):
    attend = Attend(tokens, cache, OPTIONS)
    out = []
    for number in range(len(q)):
        own = cache.geometry.owner(number) == number
        keys = (k[number], v[number]) if own else ()
        more = {} if own else {"kv_heads": KV_HEADS}
        out.append(attend(number, q[number], *keys, **more))
    return jnp.stack(out), attend.cache()


@jax.jit
def _tile(batch, cache, q, k, v):
    return layers_of(Tokens.of_tile(batch, cache), cache, q, k, v)


@jax.jit
def _decode(batch, cache, q, k, v):
    return layers_of(Tokens.of_decode(batch, cache), cache, q, k, v)


def close(got, expected):
    np.testing.assert_allclose(got, expected, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("end", [1, 7, 8, 9, 30, 37])
def test_tiles_of_a_prompt_match_dense_attention(end):
    """Unused bytes and padding are NaN."""
    case = Case()
    got, cache = case.prefill(case.cache(fill=np.nan), end)
    close(got, case.expected(0, end))
    assert np.asarray(cache.lengths).tolist() == [0, end, 0]


@pytest.mark.parametrize("prompt", [3, 8, 13])
def test_decoding_after_a_prompt_matches_dense_attention(prompt):
    case = Case()
    _, cache = case.prefill(case.cache(fill=np.nan), prompt)
    for position in range(prompt, TOTAL):
        got, cache = case.decode(cache, position)
        close(got, case.expected(position, position + 1))
        assert np.asarray(cache.lengths).tolist() == [0, position + 1, 0]


def test_what_an_idle_sequence_holds_is_left_alone():
    case = Case()
    _, cache = case.prefill(case.cache(), 13, slot=2)
    before = jax.tree.map(np.asarray, cache)
    _, cache = case.decode(cache, 0, slot=0)
    _, cache = case.tile(cache, 0, 0, slot=SLOTS)
    rows = jax.tree.leaves((before.compressed, cache.compressed))
    rings = jax.tree.leaves((before.sequence, cache.sequence))
    blocks = np.asarray(cache.block_table)[2]
    np.testing.assert_array_equal(rows[0][blocks], np.asarray(rows[1])[blocks])
    np.testing.assert_array_equal(rings[0][1:], np.asarray(rings[1])[1:])
    assert np.asarray(cache.lengths).tolist() == [1, 0, 13]


def test_stored_rows_are_read_and_not_written_before_write_from():
    """As in a replay: other keys come by, and those that are stored count."""
    case, other = Case(), Case(seed=1)
    _, cache = case.prefill(case.cache(), 16)
    stored = np.asarray(cache.compressed.layers[1])
    mixed = Case(seed=1)
    mixed.k[1, :12], mixed.v[1, :12] = case.k[1, :12], case.v[1, :12]
    got, cache = other.prefill(cache, 20, start=8, write_from=12)
    close(got[1:], mixed.expected(8, 20)[1:])
    blocks = np.asarray(cache.block_table)[1]
    after = np.asarray(cache.compressed.layers[1])[blocks].reshape(-1, 2 * KV_HEADS * WIDTH)
    np.testing.assert_array_equal(after[:12], stored[blocks].reshape(after.shape)[:12])
    np.testing.assert_array_equal(after[12:20, : KV_HEADS * WIDTH], other.k[1, 12:20].reshape(8, 8))


def test_window_rows_before_known_from_do_not_exist():
    case = Case()
    _, cache = case.prefill(case.cache(fill=np.nan), 8)
    ring = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), cache.sequence)
    cache = dataclasses.replace(cache, sequence=ring)
    got, cache = case.prefill(cache, 26, start=8, known_from=8)
    close(got, case.expected(8, 26, known_from=8))
    later, _ = case.decode(cache, 26)
    close(later, case.expected(26, 27))


def test_a_ring_that_began_at_known_from_holds_nothing_of_its_slots_past():
    case = Case()
    _, cache = case.prefill(case.cache(fill=np.nan), 9, start=8, known_from=8)
    ring = np.asarray(cache.sequence.window.layers[0])[1]
    assert np.isfinite(ring).all()
    assert np.count_nonzero(ring.any(axis=1)) == 1


def test_rows_are_attended_as_they_are_stored():
    """Rounded to bfloat16 also by the step that makes them, and alike by the next."""
    rounded = dataclasses.replace(
        GEOMETRY, row_format=formats.BFLOAT16, window_format=formats.BFLOAT16
    )
    case = Case(rounded)
    got, cache = case.prefill(case.cache(), 21)
    later, _ = case.decode(cache, 21)
    exact = Case(rounded)
    exact.k, exact.v = (
        np.asarray(jnp.asarray(x).astype(jnp.bfloat16).astype(jnp.float32))
        for x in (case.k, case.v)
    )
    close(got, exact.expected(0, 21))
    close(later, exact.expected(21, 22))
    assert np.abs(got - case.expected(0, 21)).max() > 1e-3


def test_packed_rows_are_attended_as_they_are_stored():
    """Keys and values of a token share the scale of their row; stale bytes decode to NaN."""
    packed = dataclasses.replace(
        GEOMETRY, row_format=formats.FP8_BLOCK32, window_format=formats.FP8_BLOCK32
    )
    case, exact = Case(packed), Case(packed)
    rows = np.concatenate([x.reshape(*x.shape[:2], -1) for x in (case.k, case.v)], axis=-1)
    layout = RowLayout("fp8_block32", GEOMETRY.row_width)
    rounded = jax.jit(lambda x: packing.decode(packing.encode(x, layout), layout))
    stored = np.asarray(rounded(rows))
    exact.k, exact.v = (x.reshape(case.k.shape) for x in np.split(stored, 2, axis=-1))
    got, cache = case.prefill(case.cache(fill=255), 21)
    later, _ = case.decode(cache, 21)
    close(got, exact.expected(0, 21))
    close(later, exact.expected(21, 22))
    assert np.abs(got - case.expected(0, 21)).max() > 1e-2


def test_padding_stands_at_the_last_position_and_is_token_zero():
    tokens = Tokens.of_tile(tile_batch(1, 8, 11), Case().cache())
    assert np.asarray(tokens.positions)[0].tolist() == [8, 9, 10, 10, 10, 10, 10, 10]
    assert np.asarray(tokens.tokens)[0].tolist() == [9, 9, 9, 0, 0, 0, 0, 0]
    idle = Tokens.of_tile(tile_batch(SLOTS, 0, 0), Case().cache())
    assert np.asarray(idle.positions).tolist() == [[0] * TILE]


@pytest.mark.parametrize(("start", "end"), [(8, 11), (8, 9), (0, 8), (0, 0)])
def test_the_last_token_of_a_sequence_is_told_from_padding(start, end):
    tokens = Tokens.of_tile(tile_batch(1, start, end), Case().cache())
    x = jnp.arange(TILE, dtype=jnp.float32)[None, :, None]
    assert np.asarray(tokens.last(x)).tolist() == [[max(end - start - 1, 0)]]


def attend_of(geometry=GEOMETRY):
    cache = Case(geometry).cache()
    return Attend(Tokens.of_tile(tile_batch(1, 0, 8), cache), cache, OPTIONS)


def heads(count=KV_HEADS, width=WIDTH, t=TILE):
    return jnp.zeros((1, t, count, width))


Q = heads(HEADS)


@pytest.mark.parametrize(
    ("arguments", "more", "message"),
    [
        ((3, Q, heads(), heads()), {}, "pass the layer's number as an int from 0 to 2"),
        ((jnp.asarray(0), Q, heads(), heads()), {}, "not inside a scan"),
        ((0, Q), {}, "layer 0 must give k and v: it stores its own rows"),
        ((0, Q, heads()), {}, "layer 0 must give k and v"),
        ((2, Q, heads(), heads()), {}, "must not give k and v: it reads rows of layer 1"),
        ((2, Q), {}, "pass kv_heads"),
        ((2, Q), {"kv_heads": 2}, "reads rows of layer 1: call that one first"),
        ((0, Q, heads(), heads(1)), {}, r"got \[1, 8, 4, 4\], \[1, 8, 2, 4\], \[1, 8, 1, 4\]"),
        ((0, Q, heads(t=1), heads(t=1)), {}, "must be"),
        ((0, Q, heads(4), heads(4)), {}, "needs row_width=32, keys and values, and has 16"),
        ((0, heads(3), heads(), heads()), {}, "3 query heads do not share 2 key heads evenly"),
    ],
)
def test_a_call_that_does_not_fit_the_geometry_is_refused(arguments, more, message):
    with pytest.raises(UserError, match=message):
        attend_of()(*arguments, **more)


def test_each_layer_attends_exactly_once():
    attend = attend_of()
    attend(0, Q, heads(), heads())
    with pytest.raises(UserError, match="layer 0 called attend twice"):
        attend(0, Q, heads(), heads())
    with pytest.raises(UserError, match=r"layers \[1, 2\] of the geometry did not call attend"):
        attend.cache()


@pytest.mark.parametrize(
    "layer",
    [
        LayerGeometry(ratio=4),
        LayerGeometry(ratio=1, indexed=True),
        LayerGeometry(ratio=1, window=4),
    ],
)
def test_layers_that_compress_route_or_mix_are_refused(layer):
    geometry = dataclasses.replace(GEOMETRY, layers=(layer,), index_width=4)
    with pytest.raises(UserError, match="needs its own step"):
        attend_of(geometry)(0, Q, heads(), heads())


@pytest.mark.parametrize("layer", [0, 1])
def test_a_named_implementation_that_there_is_none_of_is_refused(layer):
    """Plain heads have the reference alone."""
    case = Case(dataclasses.replace(GEOMETRY, layers=LAYERS[layer : layer + 1]))
    q, k, v = (x[None, :TILE] for x in (case.q[0], case.k[0], case.v[0]))

    def step(kernels):
        def run(cache):
            tokens = Tokens.of_tile(tile_batch(1, 0, TILE), cache)
            return Attend(tokens, cache, dataclasses.replace(OPTIONS, kernels=kernels))(0, q, k, v)

        return jax.eval_shape(run, case.cache())

    assert step("reference").shape == q.shape
    with pytest.raises(ValueError, match="no implementation 'tpu': known are reference"):
        step("tpu")

"""The indexer over packed index rows, and the choice of formats."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from geometries import FLASH_RATIOS, changed, v4
from toy import TOY, toy_options

from hybridkv import formats
from hybridkv.engine.steps import idle_decode, idle_tile
from hybridkv.state.cache import Cache
from hybridkv.state.capacity import Capacity
from models.common import rotary_angles
from models.deepseek_v4.cache_formats import CACHE_FORMATS, CacheFormats
from models.deepseek_v4.indexer import Indexer, encode_index_rows, hadamard
from models.deepseek_v4.model import DeepseekV4
from models.deepseek_v4.runtime import DeepseekV4Runtime
from models.deepseek_v4.toy import WIDE_TOY
from models.files import ConfigError
from pallas_kernels.packing import api as packing
from pallas_kernels.packing.layout import RowLayout


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("width", [1, 2, 16, 128])
def test_the_rotation_is_sylvesters_matrix(width):
    """Entry (i, j) is -1 to the number of common ones of i and j."""
    i, j = np.ogrid[:width, :width]
    matrix = (-1.0) ** np.bitwise_count(i & j) * width**-0.5
    x = random(5, width)
    np.testing.assert_allclose(hadamard(jnp.asarray(x)), x @ matrix, atol=2e-6)


def test_the_rotation_is_its_own_inverse_and_keeps_products():
    x, y = jnp.asarray(random(4, 128)), jnp.asarray(random(4, 128, seed=1))
    np.testing.assert_allclose(hadamard(hadamard(x)), x, atol=2e-6)
    turned = jnp.sum(hadamard(x) * hadamard(y), axis=-1)
    np.testing.assert_allclose(turned, jnp.sum(x * y, axis=-1), atol=2e-5)
    assert hadamard(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.parametrize("width", [0, 3, 96])
def test_other_widths_cannot_be_rotated(width):
    with pytest.raises(ValueError, match=f"power of two, got {width}"):
        hadamard(jnp.zeros((2, width)))


def test_a_model_with_such_a_width_is_refused_packed_index_rows_alone():
    odd = dataclasses.replace(TOY, index_dim=24)
    odd.geometry(row_format=formats.FP8_ROPE16, index_format=formats.BFLOAT16)
    with pytest.raises(ConfigError, match=r"index_head_dim is 24: .* mxfp4 .* power of two"):
        odd.geometry(index_format=formats.MXFP4)


@pytest.fixture(scope="module")
def model():
    """Its shapes alone."""
    return nnx.eval_shape(lambda: DeepseekV4(WIDE_TOY, nnx.Rngs(0)))


@pytest.fixture(scope="module")
def query():
    """Index queries and weights of six tokens for rows of a layout."""
    indexer = Indexer(WIDE_TOY, ratio=4, rngs=nnx.Rngs(0))
    x, latent = jnp.asarray(random(6, 32)), jnp.asarray(random(6, 16, seed=1))

    @functools.partial(jax.jit, static_argnums=0)
    def query(layout):
        positions = jnp.arange(6, dtype=jnp.int32)
        angles = rotary_angles(positions, WIDE_TOY.rope.frequencies(64))
        return indexer.query(x, latent, angles, layout)

    return query


@pytest.mark.parametrize("name", ["mxfp4", "fp8_index"])
def test_queries_are_rounded_as_rows_are(query, name):
    layout = RowLayout(name, 128)
    plain, packed = query(None), query(layout)
    np.testing.assert_array_equal(packed.weights, plain.weights)

    @jax.jit
    def as_row(x):
        return packing.decode(packing.encode(hadamard(x), layout), layout)

    @jax.jit
    def as_stored(x):
        return packing.decode(encode_index_rows(x, layout), layout)

    rounded = as_row(plain.queries)
    np.testing.assert_array_equal(as_stored(plain.queries), rounded)
    # Compiled together with what is before it, a product may differ in its last bit and so tip a
    # rounding now and then.
    assert np.mean(np.asarray(packed.queries) == np.asarray(rounded)) > 0.99
    assert np.mean(np.asarray(packed.queries) == np.asarray(plain.queries)) < 0.01


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_plain_rows_are_not_rotated_nor_queries_rounded(query, name):
    layout = RowLayout(name, 128)
    plain = query(None).queries
    np.testing.assert_array_equal(query(layout).queries, plain)
    np.testing.assert_array_equal(encode_index_rows(plain, layout), packing.encode(plain, name))


# Which formats there are to choose from.


@pytest.mark.parametrize(
    ("name", "bytes_per_token"),
    [
        ("float32", 13760),
        ("bfloat16", 6880),
        ("bfloat16_words", 6880),
        ("release", 3514.25),
        ("release_lanes", 4132),
        ("fp8_index", 3850.25),
        ("fp8_index_lanes", 4804),
        ("v4.1", 1914),
    ],
)
def test_what_a_token_of_flash_costs_in_each_choice(name, bytes_per_token):
    chosen = CACHE_FORMATS[name]
    geometry = changed(
        v4(FLASH_RATIOS, packed=False),
        window_format=chosen.window,
        row_format=chosen.rows,
        index_format=chosen.index,
    )
    assert sum(geometry.bytes_per_token.values()) == bytes_per_token


def test_all_choices_are_told_here():
    plain = {"float32", "bfloat16", "bfloat16_words"}
    packed = {"release", "release_lanes", "fp8_index", "fp8_index_lanes"}
    assert set(CACHE_FORMATS) == plain | packed | {"v4.1"}


def test_a_runtime_takes_one_format_or_one_for_each_sort_of_row(model):
    def chosen(format):
        geometry = DeepseekV4Runtime(model, format=format).geometry
        return CacheFormats(
            window=geometry.window_format, rows=geometry.row_format, index=geometry.index_format
        )

    assert chosen(None) == CACHE_FORMATS["float32"]
    assert chosen(formats.BFLOAT16) == CACHE_FORMATS["bfloat16"]
    assert chosen(CACHE_FORMATS["release"]) == CACHE_FORMATS["release"]


@pytest.mark.parametrize(
    ("name", "platform"), [("release", "tpu"), ("fp8_index", "cuda"), ("v4.1", "tpu")]
)
def test_both_steps_lower_for_accelerators_and_leave_the_caches_form(model, name, platform):
    """A weak check (lowering is not compiling): no operation of packing is missing there."""
    runtime = DeepseekV4Runtime(model, format=CACHE_FORMATS[name])
    cache = Cache.abstract(runtime.geometry, Capacity.for_tokens(runtime.geometry, tokens=64))
    options = toy_options(kernels="reference")
    for step, batch in (
        (runtime.tile_step, idle_tile(options, 1)),
        (runtime.decode_step, idle_decode(1)),
    ):
        traced = jax.jit(step, static_argnums=3).trace(runtime.params, batch, cache, options)
        _, after = traced.out_info
        forms = [(x.shape, x.dtype) for x in jax.tree.leaves(cache)]
        assert [(x.shape, x.dtype) for x in jax.tree.leaves(after)] == forms
        assert "xui8>" in traced.lower(lowering_platforms=(platform,)).as_text()

"""The GPU programs of the row formats, interpreted: the reference's bits for every code."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from gpu_bounds import watch

from pallas_kernels.interpreting import interpreted
from pallas_kernels.packing import api, gpu, gpu_kernel, reference
from pallas_kernels.packing.layout import RowLayout

QUICK = {"xla_backend_optimization_level": 0}
LAYOUTS = {
    layout.name: layout
    for layout in (
        RowLayout("fp8_rope16", 168, 24),  # a short last group, bytes of zeros at the end
        RowLayout("fp8_block32", 80),
        RowLayout("fp4_e4m3", 40),
        RowLayout("mxfp4", 64),
        RowLayout("fp8_index", 136),
    )
}
LEAD = (3, 53)
"""Axes before the row's: no whole number of tiles."""


@functools.cache
def compiled(name, function):
    own, other = getattr(api, function), getattr(reference, function)

    def both(x):
        return own(x, LAYOUTS[name], implementation="gpu"), other(x, LAYOUTS[name])

    return jax.jit(both, compiler_options=QUICK)


def bits(name, function, x):
    """Of the kernel's result and of the reference's."""
    with interpreted(True), pytest.MonkeyPatch.context() as patch:
        watch(patch, gpu_kernel)
        pair = compiled(name, function)(jnp.asarray(x))
    return [np.asarray(y).view(np.uint8 if y.dtype == jnp.uint8 else np.uint32) for y in pair]


def hard_rows(layout):
    """Codes' middles and their neighbours, powers of two, zeros, subnormals; some not finite."""
    rng = np.random.default_rng(0)
    size = (*LEAD, layout.width)
    codes = rng.integers(0, 15, size) / 2 * 2.0 ** rng.integers(-12, 12, (*LEAD, 1))
    codes = np.where(rng.random(size) < 0.2, codes * 2.0 ** rng.integers(-9, 9, size), codes)
    x = (codes * rng.choice([-1, 1], size)).astype(np.float32)
    x = (x.view(np.int32) + rng.integers(-1, 2, size, dtype=np.int32)).view(np.float32)
    x[0, :8] = rng.normal(size=(8, layout.width))
    x[1, :8] = rng.normal(size=(8, layout.width)) * 10.0 ** rng.integers(-42, 38, (8, 1))
    x[2, :4, ::5] = np.array([[-0.0], [np.inf], [-np.inf], [np.nan]])
    x[2, 4] = 0
    return x


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_encode_to_the_bytes_of_the_reference(name):
    own, other = bits(name, "encode", hard_rows(LAYOUTS[name]))
    assert own.shape == (*LEAD, LAYOUTS[name].row_bytes)
    np.testing.assert_array_equal(own, other)


@pytest.mark.parametrize("name", LAYOUTS)
def test_all_bytes_decode_to_the_bits_of_the_reference(name):
    """Each byte of a row takes all its values, each scale beside many codes."""
    size = LAYOUTS[name].row_bytes
    place = np.arange(size)
    rows = (np.arange(256)[:, None] * (1 + 2 * (place % 9)) + 37 * place).astype(np.uint8)
    assert all(len(set(rows[:, i])) == 256 for i in place)
    own, other = bits(name, "decode", rows)
    assert own.shape == (256, LAYOUTS[name].width)
    np.testing.assert_array_equal(own, other)


def test_quotients_by_a_float32_scale_are_rounded_once():
    """Quotients beside the middles of codes, which a product with a rounded inverse misses."""
    rng = np.random.default_rng(1)
    middles = (np.arange(8, 16) + 0.5) * 2.0 ** rng.integers(-8, 4, (512, 8))
    unit = rng.uniform(1, 2, (512, 1)).astype(np.float32)
    near = (middles * unit).astype(np.float32)
    near = (near.view(np.int32) + rng.integers(-2, 3, near.shape, dtype=np.int32)).view(np.float32)
    x = np.concatenate([np.tile(near, (1, 16)), np.zeros((512, 8), np.float32)], axis=1)
    x[:, :1] = 448 * unit
    own, other = bits("fp8_index", "encode", x)
    np.testing.assert_array_equal(own, other)
    scale = own[:, 136:140].copy().view(np.float32)
    np.testing.assert_array_equal(scale, x[:, :1] / np.float32(448))
    codes = np.minimum(x[:, :128] / scale, 448).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(own[:, :128], codes.view(np.uint8))


@pytest.mark.parametrize("format", ["float32", "bfloat16", "bfloat16_words"])
def test_plain_rows_are_those_of_the_reference(format):
    x = np.random.default_rng(0).normal(size=(3, 16)).astype(np.float32)
    stored = gpu.encode(jnp.asarray(x), format)
    np.testing.assert_array_equal(stored, reference.encode(jnp.asarray(x), format))
    np.testing.assert_array_equal(gpu.decode(stored, format), reference.decode(stored, format))


def test_what_it_cannot_do_is_refused_with_the_reason():
    layout = LAYOUTS["mxfp4"]
    integers = jax.ShapeDtypeStruct((2, 64), jnp.int32)
    with pytest.raises(NotImplementedError, match="no rows of int32"):
        jax.eval_shape(lambda x: gpu.encode(x, layout), integers)
    many = jax.ShapeDtypeStruct((2**31 // layout.row_bytes + 1, layout.row_bytes), jnp.uint8)
    with pytest.raises(NotImplementedError, match="2 to 4 GiB"):
        jax.eval_shape(lambda x: gpu.decode(x, layout), many)
    with pytest.raises(ValueError, match="stored rows are uint8"):
        gpu.decode(jnp.zeros((2, 9), jnp.uint8), layout)
    with pytest.raises(ValueError, match="rows of 9 channels"):
        gpu.encode(jnp.zeros((2, 9)), layout)


def test_no_rows_are_no_work():
    assert gpu.encode(jnp.zeros((0, 64)), LAYOUTS["mxfp4"]).shape == (0, 34)
    assert gpu.decode(jnp.zeros((0, 34), jnp.uint8), LAYOUTS["mxfp4"]).shape == (0, 64)

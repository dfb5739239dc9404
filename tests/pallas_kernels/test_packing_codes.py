"""Every code there is, against numpy with ml_dtypes' own tables and exact (float64) arithmetic."""

import functools
import zlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.packing import api as packing
from pallas_kernels.packing.layout import RowLayout

E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
E2M1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
UE8M0 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
LAYOUTS = [
    RowLayout("fp8_rope16", 512, 64),
    RowLayout("fp8_rope16", 40, 8),
    RowLayout("fp8_block32", 512, 64),
    RowLayout("fp4_e4m3", 512, 64),
    RowLayout("mxfp4", 128),
    RowLayout("mxfp4", 48),
    RowLayout("fp8_index", 128),
]
GROUP = {"fp8_rope16": 64, "fp8_block32": 32, "fp4_e4m3": 16, "mxfp4": 32, "fp8_index": 128}
every_layout = pytest.mark.parametrize(
    "layout", LAYOUTS, ids=lambda x: f"{x.name}-{x.width}-{x.rope}"
)


def seeded(layout: RowLayout) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(repr(layout).encode()))


@functools.cache
def compiled(operation, layout):
    """Where a division by a constant might become a product."""
    return jax.jit(functools.partial(operation, format=layout))


def encoded(x, layout):
    return np.asarray(compiled(packing.encode, layout)(jnp.asarray(x)))


def decoded(stored, layout):
    return np.asarray(compiled(packing.decode, layout)(jnp.asarray(stored)))


def same_bits(ours, theirs):
    """Equal, bit for bit, where no NaN is; NaN where NaN is."""
    assert ours.dtype == np.float32
    with np.errstate(over="ignore", invalid="ignore"):
        theirs = np.asarray(theirs).astype(np.float32)
    nan = np.isnan(theirs)
    np.testing.assert_array_equal(np.isnan(ours), nan)
    np.testing.assert_array_equal(ours.view(np.uint32)[~nan], theirs.view(np.uint32)[~nan])


# The format by hand: one row of plain numpy at a time.


def exact_scale(amax: float, name: str) -> tuple[np.ndarray, float]:
    """Stored bytes and value of the scale of a group of finite channels."""
    floor = {"mxfp4": 6 * 2.0**-126, "fp4_e4m3": 6 * 2.0**-9}.get(name, float(np.float32(1e-4)))
    amax = max(amax, floor)
    if name == "fp8_index":
        scale = np.float32(amax) / np.float32(448)
        return np.frombuffer(scale.astype("<f4").tobytes(), np.uint8), float(scale)
    if name == "fp4_e4m3":
        code = np.float64(min(amax / 6, 448.0)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        return code[None], E4M3[code]
    largest = 6 if name == "mxfp4" else 448
    exponent = -127
    while largest * 2.0**exponent < amax:
        exponent += 1
    return np.array([exponent + 127], np.uint8), 2.0**exponent


def encode_by_hand(row: np.ndarray, layout: RowLayout) -> np.ndarray:
    name, group = layout.name, GROUP[layout.name]
    coded = layout.width - layout.rope if name == "fp8_rope16" else layout.width
    codes, scales = [], []
    for start in range(0, coded, group):
        x = row[start : min(start + group, coded)].astype(np.float64)
        stored, scale = exact_scale(np.abs(x).max(), name)
        scales.append(stored)
        if name == "fp8_index":
            y = (x.astype(np.float32) / np.float32(scale)).astype(np.float64)
        else:
            y = x / scale
        if name in ("mxfp4", "fp4_e4m3"):
            small = np.clip(y, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
        else:
            small = np.clip(y, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        codes.append(small)
    data = np.concatenate(codes)
    if name in ("mxfp4", "fp4_e4m3"):
        data = data[0::2] | data[1::2] << 4
    wide = np.frombuffer(row[coded:].astype(ml_dtypes.bfloat16).tobytes(), np.uint8)
    out = np.concatenate([data, wide, *scales])
    return np.pad(out, (0, -len(out) % (8 if name == "fp8_rope16" else 1)))


def hard_rows(layout: RowLayout) -> np.ndarray:
    """Magnitudes over the whole range, ties, powers of two and their neighbours, zeros."""
    rng = seeded(layout)
    spread = rng.normal(size=(150, layout.width)) * 2.0 ** rng.integers(-30, 30, (150, 1))
    mixed = rng.normal(size=(100, layout.width)) * 2.0 ** rng.integers(-40, 10, (100, layout.width))
    tiny = rng.normal(size=(40, layout.width)) * 2.0 ** rng.integers(-140, -118, (40, 1))
    huge = rng.normal(size=(10, layout.width)) * 2.0**118
    # Ties: multiples of half a step below a largest value that fixes the scale at a power of two.
    ties = rng.integers(-24, 25, (150, layout.width)) / 4.0
    ties[:, :: GROUP[layout.name]] = rng.choice([6.0, 448.0, 3.0, 5.0, 224.0, 232.0], (150, 1))
    ties *= 2.0 ** rng.integers(-18, 18, (150, 1))
    rows = np.concatenate([spread, mixed, tiny, huge, ties]).astype(np.float32)
    rows = np.concatenate([rows, np.zeros_like(rows[:1]), -np.zeros_like(rows[:1])])
    near = np.nextafter(rows, np.float32(np.inf) * rng.choice([-1, 1], rows.shape))
    return np.concatenate([rows, near.astype(np.float32)])


@every_layout
def test_rows_have_the_bytes_that_are_made_by_hand(layout):
    rows = hard_rows(layout)
    expected = np.stack([encode_by_hand(row, layout) for row in rows])
    np.testing.assert_array_equal(encoded(rows, layout), expected)


@every_layout
def test_bytes_mean_what_the_tables_say(layout):
    """Any bytes at all, scales that encoding never makes among them."""
    rng, group = seeded(layout), GROUP[layout.name]
    stored = rng.integers(0, 256, (3000, layout.row_bytes)).astype(np.uint8)
    scales = stored[:, layout.scales]
    if layout.name == "fp8_index":
        scales = rng.normal(size=(3000, 1)) * 10.0 ** rng.integers(-30, 38, (3000, 1))
        scales[:100] = rng.choice([np.nan, np.inf], (100, 1))
        scales = scales.astype("<f4")
        stored[:, layout.scales] = scales.view(np.uint8)
        scales = scales.astype(np.float64)
    elif layout.name == "fp4_e4m3":
        scales = np.abs(E4M3[scales])
    else:
        scales = UE8M0[scales]
    data = stored[:, layout.data]
    if layout.name in ("fp4_e4m3", "mxfp4"):
        data = E2M1[np.stack([data & 15, data >> 4], -1).reshape(len(data), -1)]
    else:
        data = E4M3[data]
    with np.errstate(invalid="ignore"):
        coded = data * np.repeat(scales, group, axis=1)[:, : data.shape[1]]
        wide = stored[:, layout.wide].copy().view(ml_dtypes.bfloat16).astype(np.float64)
        expected = np.concatenate([coded, wide], axis=1)
    same_bits(decoded(stored, layout), expected)


def rows_of_codes(layout: RowLayout, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """A row for each scale byte, whose first data bytes are ``codes``; all groups alike."""
    stored = np.zeros((len(scales), layout.row_bytes), np.uint8)
    stored[:, : len(codes)] = codes
    stored[:, layout.scales] = scales[:, None]
    return stored


ALL = np.arange(256, dtype=np.uint8)


def test_every_e4m3_code_with_every_ue8m0_scale():
    layout = RowLayout("fp8_block32", 256)
    with np.errstate(invalid="ignore"):
        same_bits(decoded(rows_of_codes(layout, ALL, ALL), layout), UE8M0[:, None] * E4M3[None])


def test_every_e2m1_code_with_every_ue8m0_scale():
    layout = RowLayout("mxfp4", 32)
    codes = np.arange(0, 16, 2, dtype=np.uint8)
    values = decoded(rows_of_codes(layout, codes | codes + 1 << 4, ALL), layout)[:, :16]
    same_bits(values, UE8M0[:, None] * E2M1[None])


def test_every_e2m1_code_with_every_e4m3_scale():
    """A scale has no sign: its highest bit is not read."""
    layout = RowLayout("fp4_e4m3", 16)
    codes = np.arange(0, 16, 2, dtype=np.uint8)
    values = decoded(rows_of_codes(layout, codes | codes + 1 << 4, ALL), layout)[:, :16]
    same_bits(values, np.abs(E4M3[:, None]) * E2M1[None])


@every_layout
def test_every_code_is_kept_where_its_scale_is(layout):
    """Encoding what was decoded gives the same values, and from then on the same bytes."""
    rows = hard_rows(layout)
    if layout.name == "fp4_e4m3":  # below, a scale has too few bits for its own largest value
        amax = np.abs(rows).reshape(len(rows), -1, 16).max(axis=-1)
        rows = rows[((amax == 0) | (amax > 6 * 2.0**-6)).all(axis=1)]
    stored = encoded(rows, layout)
    once = decoded(stored, layout)
    finite = np.isfinite(once).all(axis=1)
    once = once[finite]
    again = encoded(once, layout)
    twice = decoded(again, layout)
    if layout.name == "fp8_index":  # float32 scales are rounded again, by their last bit at most
        np.testing.assert_allclose(twice, once, rtol=2**-22, atol=0)
        return
    same_bits(twice, once)
    np.testing.assert_array_equal(encoded(twice, layout), again)
    other = (again != stored[finite]).any(axis=1)
    if layout.name == "fp4_e4m3":
        assert not other.any()
    else:
        assert 0 < other.mean() < 1  # the largest code was rounded to half the range, see the api


# What is not a number, and what stands beside it.


@every_layout
@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_a_group_that_is_not_finite_is_read_as_nan_and_no_other_byte_changes(layout, odd):
    rng, group = seeded(layout), GROUP[layout.name]
    rows = rng.normal(size=(3, layout.width)).astype(np.float32)
    coded = layout.coded
    for channel in (0, coded - 1):
        spoiled = rows.copy()
        spoiled[1, channel] = odd
        before, after = encoded(rows, layout), encoded(spoiled, layout)
        np.testing.assert_array_equal(after[[0, 2]], before[[0, 2]])
        first = channel // group * group
        own = slice(first, min(first + group, coded))
        expected = decoded(before, layout).copy()
        expected[1, own] = np.nan
        same_bits(decoded(after, layout), expected)


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_a_rotary_channel_that_is_not_finite_stays_alone(odd):
    layout = RowLayout("fp8_rope16", 72, 8)
    rows = np.ones((2, 72), np.float32)
    rows[0, 70] = odd
    expected = np.ones((2, 72))
    expected[0, 70] = odd
    same_bits(decoded(encoded(rows, layout), layout), expected)


@every_layout
def test_zeros_keep_their_sign(layout):
    rows = np.zeros((2, layout.width), np.float32)
    rows[1] = -0.0
    same_bits(decoded(encoded(rows, layout), layout), rows)


@every_layout
def test_bytes_of_zeros_are_rows_of_zeros(layout):
    """An empty cache."""
    zeros = np.zeros((2, layout.row_bytes), np.uint8)
    same_bits(decoded(zeros, layout), np.zeros((2, layout.width)))


@every_layout
def test_bfloat16_rows_are_taken_as_the_numbers_they_are(layout):
    rows = hard_rows(layout).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(encoded(rows, layout), encoded(rows.astype(np.float32), layout))


# The scale rules at their edges.


@pytest.mark.parametrize(("name", "largest"), [("fp8_block32", 448), ("mxfp4", 6)])
def test_a_scale_steps_just_above_each_power_of_two(name, largest):
    layout = RowLayout(name, 32)
    exponents = np.arange(-21 if largest == 448 else -126, 120)
    exact = (largest * 2.0**exponents).astype(np.float32)
    for amax, expected in (
        (np.nextafter(exact, np.float32(0)), exponents),
        (exact, exponents),
        (np.nextafter(exact, np.float32(np.inf)), exponents + 1),
    ):
        rows = np.zeros((len(amax), 32), np.float32)
        rows[:, 7] = -amax
        if largest == 6:
            expected = np.maximum(expected, -126)
        np.testing.assert_array_equal(encoded(rows, layout)[:, -1], expected + 127)


@pytest.mark.parametrize(
    ("layout", "below", "scale"),
    [
        (RowLayout("fp8_block32", 32), 1e-5, [127 - 22]),
        (RowLayout("mxfp4", 32), 1e-45, [1]),
        (RowLayout("fp4_e4m3", 16), 1e-4, [1]),
        (RowLayout("fp8_index", 128), 9e-5, list((np.float32(1e-4) / np.float32(448)).tobytes())),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_a_scale_is_not_below_its_floor(layout, below, scale):
    rows = np.full((1, layout.width), below, np.float32)
    assert encoded(rows, layout)[0, layout.scales].tolist() == scale


def test_the_smallest_numbers_are_kept_where_the_scale_reaches_them():
    """Subnormal float32 numbers, which XLA's CPU compiler takes for zeros in arithmetic."""
    layout = RowLayout("mxfp4", 32)
    row = np.float32(2.0**-126) * np.tile(np.float32([0.5, 0.25, 0.75, -1.5]), 8)
    expected = 2.0**-126 * np.tile([0.5, 0.0, 1.0, -1.5], 8)
    same_bits(decoded(encoded(row[None], layout), layout), expected[None])


def test_values_past_the_largest_scale_are_limited():
    layout = RowLayout("fp4_e4m3", 16)
    rows = np.full((1, 16), 1e6, np.float32)
    rows[0, 3] = -2700.0
    expected = np.full((1, 16), 6.0 * 448)
    expected[0, 3] *= -1
    same_bits(decoded(encoded(rows, layout), layout), expected)


def test_float32_scales_are_the_rounded_quotients():
    """Among them the many that a product with the rounded inverse of 448 would miss."""
    layout = RowLayout("fp8_index", 128)
    rng = np.random.default_rng(0)
    amax = (2.0 ** rng.uniform(-12, 120, 20000)).astype(np.float32)
    rows = np.zeros((len(amax), 128), np.float32)
    rows[:, 0] = amax
    scales = encoded(rows, layout)[:, layout.scales].copy().view("<f4")[:, 0]
    np.testing.assert_array_equal(scales, amax / np.float32(448))
    assert (scales != amax * (np.float32(1) / np.float32(448))).mean() > 0.1


# Nothing depends on what else is encoded.


@every_layout
def test_a_row_has_the_same_bytes_in_a_batch_of_any_shape(layout):
    rows = hard_rows(layout)[:96]
    stored = encoded(rows, layout)
    values = decoded(stored, layout)
    again = encoded(rows.reshape(2, 3, 16, -1), layout)
    np.testing.assert_array_equal(again.reshape(96, -1), stored)
    same_bits(decoded(again, layout).reshape(96, -1), values)
    np.testing.assert_array_equal(encoded(rows[17], layout), stored[17])
    same_bits(decoded(stored[17], layout), values[17])


@every_layout
def test_no_rows_at_all_are_packed_to_none(layout):
    stored = packing.encode(jnp.zeros((0, 3, layout.width)), layout)
    assert stored.shape == (0, 3, layout.row_bytes)
    assert packing.decode(stored, layout).shape == (0, 3, layout.width)

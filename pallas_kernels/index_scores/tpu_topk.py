"""The exact k largest of scores in VMEM, as ascending places: one query's ranking on a TPU core.

Scores become int32 keys of the same order, and keys that may not be picked become ``EXCLUDED``:

    scores [tiles, 8, 128] --order_keys--> keys [8 * tiles, 128] --kth_largest--> the k-th key
    keys, the k-th key --compact--> [1, places] the picked places, ascending

Place ``r`` is group ``r // 128``, lane ``r % 128``. Every loop runs to the query's own length.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

LANES = 128
TILE = 8 * LANES
CHUNK_GROUPS = 128
CHUNK = CHUNK_GROUPS * LANES
"""Places of one step of ``compact``; a ranking's memory is a multiple of this."""
EXCLUDED = np.int32(np.iinfo(np.int32).min)
NO_ROW = np.int32(np.iinfo(np.int32).max)

_UNROLL = 8
_FAR = tuple(range(22, 29))
LONG = 48 * TILE
"""Places from which counting costs more than the wait for a count."""
Ref = Any


class Cut(NamedTuple):
    """Which keys are picked: those above ``key``, and the first ``ties`` of those equal to it."""

    key: jax.Array
    ties: jax.Array
    tied: jax.Array
    """False where all keys equal to ``key`` are picked."""


def divide(a: Any, b: int) -> tuple[Any, Any]:
    """Quotient and remainder of scalars that are not negative.

    Mosaic's ``//`` and ``%`` would ask for signs, and for the kind of the device to compile them.
    """
    if isinstance(a, int):
        return divmod(a, b)
    if b & (b - 1) == 0:
        return a >> (b.bit_length() - 1), a & (b - 1)
    quotient = jax.lax.div(a, jnp.int32(b))
    return quotient, a - quotient * b


def cdiv(a: Any, b: int) -> Any:
    """Ceiling of ``a / b`` for what is not negative."""
    return divide(a + (b - 1), b)[0]


def order_keys(scores: Ref, keys: Ref, visible: jax.Array) -> jax.Array:
    """Fills keys of places below ``visible``, and ``EXCLUDED`` up to the end of its chunk.

    The order is that of float32, with ``-0.0`` equal to ``0.0``. What scores hold from ``visible``
    on is not used, NaN included. Returns the largest key.
    """
    place = _iota((8, LANES), 0) * LANES + _iota((8, LANES), 1)

    def body(step: jax.Array, top: jax.Array) -> jax.Array:
        """Keys of some tiles, and the largest so far in each place."""
        for number in range(_UNROLL):
            tile = step * _UNROLL + number
            score = scores[tile]
            bits = jax.lax.bitcast_convert_type(jnp.where(score == 0.0, 0.0, score), jnp.int32)
            key = jnp.where(bits < 0, bits ^ NO_ROW, bits)
            key = jnp.where(place + tile * TILE < visible, key, EXCLUDED)
            keys[pl.ds(pl.multiple_of(tile * 8, 8), 8), :] = key
            top = jnp.maximum(top, key)
        return top

    steps = cdiv(visible, CHUNK) * (CHUNK // (TILE * _UNROLL))
    return jnp.max(jax.lax.fori_loop(0, steps, body, jnp.full((8, LANES), EXCLUDED)))


def kth_largest(keys: Ref, top: jax.Array, visible: jax.Array, k: int) -> Cut:
    """Where to cut so that exactly ``k`` keys are picked, of ``visible > k``.

    ``top`` is the largest. First how far the k-th is below the top, in powers of two; then a few
    bits a pass, from the highest, until a threshold is reached by exactly k keys.
    """
    thresholds = [top - jnp.int32((1 << far) - 1) for far in reversed(_FAR)]
    # The k-th key may be further away than the furthest, or that may be below all numbers.
    low, reached, bits = jnp.int32(EXCLUDED), visible, jnp.int32(32)
    for far, threshold, total in zip(
        reversed(_FAR), thresholds, _count_reaching(keys, visible, thresholds), strict=True
    ):
        better = (total >= k) & (threshold <= top)
        low, reached = jnp.where(better, threshold, low), jnp.where(better, total, reached)
        bits = jnp.where(better, max(far - 1, _FAR[0]), bits)
    low, reached = jax.lax.cond(
        visible > LONG,
        lambda: _narrowed(keys, visible, k, (bits, low, reached), width=2),
        lambda: _narrowed(keys, visible, k, (bits, low, reached), width=3),
    )
    tied = reached != k
    above = jax.lax.cond(
        tied, lambda: _count_reaching(keys, visible, [low + 1])[0], lambda: jnp.int32(0)
    )
    return Cut(low, k - above, tied)


def _narrowed(
    keys: Ref, visible: jax.Array, k: int, start: tuple[jax.Array, ...], width: int
) -> tuple[jax.Array, jax.Array]:
    """A key and how many reach it: the k-th largest, or one that exactly ``k`` reach.

    The k-th is one of the ``2**bits`` keys from ``low`` on; a pass takes ``width`` bits off.
    """

    def search(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """One pass: fewer bits are open, from a threshold on that enough keys reach."""
        bits, low, reached = state
        shift = jnp.maximum(bits - width, 0)
        # A last pass of fewer bits has thresholds past the range: fewer than k reach those, or
        # they wrap round and are below.
        thresholds = [low + (jnp.int32(d) << shift) for d in range(1, 2**width)]
        for threshold, total in zip(
            thresholds, _count_reaching(keys, visible, thresholds), strict=True
        ):
            better = (total >= k) & (threshold > low)
            low, reached = jnp.where(better, threshold, low), jnp.where(better, total, reached)
        return shift, low, reached

    def unsettled(state: tuple[jax.Array, ...]) -> jax.Array:
        """Whether bits are open and no threshold is reached by exactly ``k``."""
        bits, _, reached = state
        return (bits > 0) & (reached != k)

    _, low, reached = jax.lax.while_loop(unsettled, search, start)
    return low, reached


def _count_reaching(keys: Ref, visible: jax.Array, thresholds: list[jax.Array]) -> list[jax.Array]:
    """How many keys are at or above each threshold."""

    def body(step: jax.Array, sums: list[jax.Array]) -> list[jax.Array]:
        """Adds some tiles."""
        for number in range(_UNROLL):
            tile = step * _UNROLL + number
            key = keys[pl.ds(pl.multiple_of(tile * 8, 8), 8), :]
            sums = [s + (key >= t).astype(jnp.int32) for s, t in zip(sums, thresholds, strict=True)]
        return sums

    zero = jnp.zeros((8, LANES), jnp.int32)
    steps = cdiv(visible, TILE * _UNROLL)
    sums = jax.lax.fori_loop(0, steps, body, [zero] * len(thresholds))
    return [jnp.sum(s) for s in sums]


def compact(keys: Ref, cut: Cut, visible: jax.Array, gathered: Ref, places: int) -> jax.Array:
    """int32 ``[1, places]``: the places of the picked keys, ascending, then ``NO_ROW``.

    ``places`` is a multiple of 128 and at least the number picked; ``gathered`` is float32 scratch
    ``[128, places]``. Output ``j`` finds its group by prefix counts over groups, takes that group's
    mask by a product with a one-hot matrix, and its lane by a prefix count over the mask. All
    numbers are integers below 2**24 and so exact.
    """
    gathered[...] = jnp.zeros_like(gathered)
    wanted = _iota((CHUNK_GROUPS, LANES), 1)
    number = _iota((CHUNK_GROUPS, LANES), 0).astype(jnp.float32)
    zero = jnp.zeros((1, places), jnp.float32)

    def body(chunk: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Adds the groups of a chunk to the places that they fill."""
        before, equal_before, group, offset = state
        key = keys[pl.ds(pl.multiple_of(chunk * CHUNK_GROUPS, CHUNK_GROUPS), CHUNK_GROUPS), :]
        mask, equal_before = jax.lax.cond(
            cut.tied,
            lambda: _tied_mask(key, cut, equal_before),
            lambda: (_as_counts(key >= cut.key), equal_before),
        )
        counts = _product(mask, jnp.ones((LANES, LANES), jnp.bfloat16))
        through = _product(_lower(), counts.astype(jnp.bfloat16)) + before
        start = through - counts
        parts = []
        for first in range(0, places, LANES):
            j = (wanted + first).astype(jnp.float32)
            parts.append((start <= j) & (j < through))
        here = jnp.concatenate([p.astype(jnp.float32) for p in parts], axis=1)
        gathered[...] += jax.lax.dot_general(
            mask,
            here.astype(jnp.bfloat16),
            (((0,), (0,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        wide = _repeat(number + (chunk * CHUNK_GROUPS).astype(jnp.float32), places)
        group += jnp.sum(here * wide, axis=0, keepdims=True)
        offset += jnp.sum(here * _repeat(start, places), axis=0, keepdims=True)
        return before + jnp.sum(counts[:, :1]), equal_before, group, offset

    start = (jnp.float32(0), jnp.float32(0), zero, zero)
    total, _, group, offset = jax.lax.fori_loop(0, cdiv(visible, CHUNK), body, start)
    j = _iota((1, places), 1).astype(jnp.float32)
    through = _product(_lower(), gathered[...].astype(jnp.bfloat16))
    lane = jnp.sum((through <= j - offset).astype(jnp.float32), axis=0, keepdims=True)
    found = (group * LANES + lane).astype(jnp.int32)
    return jnp.where(j < total, found, NO_ROW)


def _tied_mask(key: jax.Array, cut: Cut, before: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The picks of a chunk when only the first of equal keys are picked, and equal keys so far."""
    equal = _as_counts(key == cut.key)
    counts = _product(equal, jnp.ones((LANES, LANES), jnp.bfloat16))
    earlier = _product(_lower(), counts.astype(jnp.bfloat16)) - counts
    rank = _product(equal, _lower().T) + earlier + before
    picked = (key > cut.key) | ((key == cut.key) & (rank <= cut.ties.astype(jnp.float32)))
    return _as_counts(picked), before + jnp.sum(counts[:, :1])


def _lower() -> jax.Array:
    """``[128, 128]`` with ones on and below the diagonal: a product with it is a prefix sum."""
    return _as_counts(_iota((LANES, LANES), 0) >= _iota((LANES, LANES), 1))


def _as_counts(mask: jax.Array) -> jax.Array:
    return mask.astype(jnp.float32).astype(jnp.bfloat16)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def _repeat(x: jax.Array, width: int) -> jax.Array:
    return jnp.concatenate([x] * (width // LANES), axis=1)


def _iota(shape: tuple[int, int], axis: int) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)

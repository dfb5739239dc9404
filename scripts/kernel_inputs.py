"""Real arguments for the kernels' cases: random numbers, shuffled blocks, what a decode step sees.

A case of ``kernel_cases`` says shapes only. Here every array gets the values it would have in the
middle of a generation: sequences as long as the case says, tables in random order, picks among the
visible rows. Big pools are made on the device.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from kernel_cases import KernelCase

from pallas_kernels.blocks import BlockRows
from pallas_kernels.packing import api as packing
from pallas_kernels.packing.layout import Format
from pallas_kernels.sequences import Active

_CHUNK = 1 << 16
"""Rows of a pool that are encoded at once."""


def concrete(case: KernelCase, operation: str, seed: int) -> tuple[Any, ...]:
    """Arguments of ``case.function``, on the default device."""
    rng = np.random.default_rng(seed)
    return _MAKERS[operation](case, rng)


def _normal(rng: np.random.Generator, form: Any) -> jax.Array:
    key = jax.random.key(int(rng.integers(1 << 31)))
    return jax.random.normal(key, form.shape, form.dtype)


def stored(rng: np.random.Generator, form: Any, width: int, format: Format) -> jax.Array:
    """Encoded random rows of shape ``form.shape``, whose last axis is what is stored."""
    count = int(np.prod(form.shape[:-1]))
    key = jax.random.key(int(rng.integers(1 << 31)))

    @jax.jit
    def some(number: jax.Array) -> jax.Array:
        rows = jax.random.normal(jax.random.fold_in(key, number), (min(_CHUNK, count), width))
        return packing.encode(rows, format)

    parts = [some(number) for number in range(-(-count // _CHUNK))]
    return jnp.concatenate(parts)[:count].reshape(form.shape)


def _rows(rng: np.random.Generator, rows: BlockRows, width: int, format: Format) -> BlockRows:
    shape = rows.table.shape
    table = rng.permutation(rows.pool.shape[0])[: shape[0] * shape[1]].reshape(shape)
    pool = stored(rng, rows.pool, width, format)
    return BlockRows(pool, jnp.asarray(table, jnp.int32))


def _attention(case: KernelCase, rng: np.random.Generator) -> tuple[Any, ...]:
    given = dict(case.arguments[0])
    n, t, _, width = given["q"].shape
    last = case.tokens - t
    real = {
        "q": _normal(rng, given["q"]),
        "local": stored(rng, given["local"], width, case.local_format),
        "first": jnp.full((n,), last, jnp.int32),
        "sink": _normal(rng, given["sink"]),
        "active": Active.all(n),
    }
    if "rows" in given:
        real["rows"] = _rows(rng, given["rows"], width, case.format)
        seen = (last + 1 + np.arange(t)) // case.ratio
        real["visible"] = jnp.broadcast_to(jnp.asarray(seen, jnp.int32), (n, t))
    if "picks" in given:
        few, k = int(seen.min()), given["picks"].shape[-1]
        picks = [np.sort(rng.permutation(few)[:k]) for _ in range(n * t)]
        real["picks"] = jnp.asarray(np.stack(picks).reshape(n, t, k), jnp.int32)
    return (real,)


def _index_scores(case: KernelCase, rng: np.random.Generator) -> tuple[Any, ...]:
    queries, weights, rows, visible, _ = case.arguments
    n, t = visible.shape
    seen = (case.tokens - t + 1 + np.arange(t)) // case.ratio
    return (
        _normal(rng, queries),
        _normal(rng, weights),
        _rows(rng, rows, queries.shape[-1], case.format),
        jnp.broadcast_to(jnp.asarray(seen, jnp.int32), (n, t)),
        Active.all(n),
    )


def _moves(case: KernelCase, rng: np.random.Generator) -> tuple[Any, ...]:
    *arrays, places = case.arguments
    bits = [jax.random.bits(jax.random.key(i), x.shape, x.dtype) for i, x in enumerate(arrays)]
    chosen = rng.permutation(arrays[0].shape[0])[: places.shape[0]]
    return (*bits, jnp.asarray(chosen, jnp.int32))


def _floats(case: KernelCase, rng: np.random.Generator) -> tuple[Any, ...]:
    def one(form: Any) -> jax.Array:
        return jnp.asarray(True) if form.dtype == jnp.bool_ else _normal(rng, form)

    return tuple(jax.tree.map(one, case.arguments))


def _packing(case: KernelCase, rng: np.random.Generator) -> tuple[Any, ...]:
    (form,) = case.arguments
    if form.dtype == jnp.float32:
        return (_normal(rng, form),)
    return (stored(rng, form, case.width, case.format),)


_MAKERS = {
    "attention": _attention,
    "index_scores": _index_scores,
    "moves": _moves,
    "compression": _floats,
    "packing": _packing,
}

"""Batches of sequences in one pool whose unused bytes are NaN and unused table entries garbage."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.blocks import BlockRows
from pallas_kernels.sequences import Active

GARBAGE = (-1, -(2**31), 2**31 - 1, 7)


def stored(values: np.ndarray, format: str) -> jax.Array:
    """float32 values that bfloat16 has exactly, in their stored form."""
    if format == "float32":
        return jnp.asarray(values, jnp.float32)
    return jnp.asarray((values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16))


def halves(values: np.ndarray) -> np.ndarray:
    """The nearest values towards zero that bfloat16 has."""
    return (values.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def batched(
    rows: list[np.ndarray],
    *,
    format: str = "float32",
    per: int = 4,
    blocks: int = 64,
    places: int = 32,
    seed: int = 0,
    fill: float = np.nan,
    garbage: tuple[int, ...] = GARBAGE,
) -> BlockRows:
    """Rows of each sequence in random blocks of one pool."""
    rng = np.random.default_rng(seed)
    width = max((r.shape[1] for r in rows), default=1)
    pool = np.full((blocks, per, width), fill, np.float32)
    table = rng.choice(np.asarray(garbage, np.int64), (len(rows), places)).astype(np.int32)
    free = list(rng.permutation(blocks))
    for sequence, own in enumerate(rows):
        for start in range(0, len(own), per):
            part = own[start : start + per]
            table[sequence, start // per] = free.pop()
            pool[table[sequence, start // per], : len(part)] = part
    return BlockRows(stored(pool, format), jnp.asarray(table))


def active(n: int, which: Any = None) -> Active:
    """The sequences ``which`` (all without it), then the others."""
    some = list(range(n)) if which is None else list(which)
    order = some + [i for i in range(n) if i not in some]
    return Active(jnp.asarray(order, jnp.int32), jnp.asarray(len(some), jnp.int32))

"""Rows in shuffled blocks whose every unused byte is NaN, and the float64 view of them."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.blocks import BlockRows

OTHER_POOLS = (
    {"blocks": 5, "table": 5},
    {"blocks": 300, "table": 200},
    {"seed": 3},
    {"fill": np.inf},
    {"fill": 0.0},
    {"fill": 1e38},
)
"""Of ``pooled``: what must not change any bit of a result."""


def pooled(
    rows: np.ndarray,
    *,
    per: int = 4,
    blocks: int = 40,
    table: int = 32,
    seed: int = 0,
    fill: float = np.nan,
) -> BlockRows:
    """A pool of ``blocks`` that holds ``rows`` in random blocks; table entries past them point
    at random other blocks or past the pool, as stale ones would.
    """
    rng = np.random.default_rng(seed)
    used = -(-len(rows) // per)
    numbers = rng.permutation(blocks).astype(np.int32)
    pool = np.full((blocks, per, rows.shape[1]), fill, np.float32)
    for number, row in enumerate(rows):
        pool[numbers[number // per], number % per] = row
    stale = rng.choice(np.append(numbers[used:], blocks), table - used).astype(np.int32)
    return BlockRows(jnp.asarray(pool), jnp.asarray(np.concatenate([numbers[:used], stale])))

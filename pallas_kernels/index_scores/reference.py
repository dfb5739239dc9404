"""XLA implementation of ``pick_rows``: a streaming top-k over key blocks in absolute order."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.blocks import BlockRows, key_block_rows, read_key_block
from pallas_kernels.packing.layout import Format
from pallas_kernels.sequences import Active, map_sequences

NO_ROW = np.iinfo(np.int32).max


def pick_rows_of_sequences(
    queries: Float[Array, "n t heads width"],
    weights: Float[Array, "n t heads"],
    rows: BlockRows,
    visible: Int[Array, "n t"],
    *,
    topk: int,
    active: Active,
    key_block: int,
    format: Format,
    sequential: bool,
) -> Int[Array, "n t topk"]:
    """See ``api.pick_rows``."""

    def one(
        queries: jax.Array, weights: jax.Array, table: jax.Array, visible: jax.Array
    ) -> jax.Array:
        return pick_rows(
            queries,
            weights,
            BlockRows(rows.pool, table),
            visible,
            topk=topk,
            key_block=key_block,
            format=format,
        )

    arguments = (queries, weights, rows.table, visible)
    return map_sequences(one, arguments, active, sequential=sequential)


def pick_rows(
    queries: Float[Array, "t heads width"],
    weights: Float[Array, "t heads"],
    rows: BlockRows,
    visible: Int[Array, " t"],
    *,
    topk: int,
    key_block: int,
    format: Format,
) -> Int[Array, "t topk"]:
    """Of one sequence; otherwise as ``api.pick_rows``."""
    row = jnp.arange(topk, dtype=jnp.int32)

    def every() -> jax.Array:
        return jnp.where(row[None, :] < visible[:, None], row[None, :], NO_ROW)

    def best() -> jax.Array:
        return _stream(queries, weights, rows, visible, topk, key_block, format)

    # While all visible rows fit, scores do not matter and are not computed.
    return jax.lax.cond(visible[-1] <= topk, every, best)


def _stream(
    queries: jax.Array,
    weights: jax.Array,
    rows: BlockRows,
    visible: jax.Array,
    topk: int,
    key_block: int,
    format: Format,
) -> Int[Array, "t topk"]:
    size = key_block_rows(rows.rows_per_block, key_block)
    t, length = queries.shape[0], visible[-1]

    def body(number: jax.Array, best: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        keys = read_key_block(rows, number, size, length, format)
        row = number * size + jnp.arange(size, dtype=jnp.int32)
        scores = block_scores(queries, weights, keys)
        scores = jnp.where(row[None, :] < visible[:, None], scores, -jnp.inf)
        # Earlier rows stand first and top_k is stable, so ties go to the lowest row.
        scores = jnp.concatenate([best[0], scores], axis=1)
        row = jnp.concatenate([best[1], jnp.broadcast_to(row, (t, size))], axis=1)
        scores, at = jax.lax.top_k(scores, topk)
        return scores, jnp.take_along_axis(row, at, axis=1)

    start = (
        jnp.full((t, topk), -jnp.inf, jnp.float32),
        jnp.full((t, topk), NO_ROW, jnp.int32),
    )
    scores, picks = jax.lax.fori_loop(0, (length + size - 1) // size, body, start)
    return jnp.sort(jnp.where(jnp.isneginf(scores), NO_ROW, picks), axis=1)


def block_scores(
    queries: Float[Array, "t heads width"],
    weights: Float[Array, "t heads"],
    keys: Float[Array, "k width"],
) -> Float[Array, "t k"]:
    """Scores of one key block, float32."""
    hits = jax.nn.relu(jnp.einsum("thc,kc->thk", queries.astype(jnp.float32), keys))
    scores = jnp.einsum("thk,th->tk", hits, weights)
    # top_k ranks -0.0 below 0.0. A selection, because XLA may drop an added zero.
    return jnp.where(scores == 0.0, 0.0, scores)

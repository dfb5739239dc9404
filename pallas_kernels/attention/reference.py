"""XLA implementation of ``attend``: exact under changes of capacity, neighbours and stale bytes."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from pallas_kernels.blocks import BlockRows, key_block_rows, read_key_block, read_picked
from pallas_kernels.packing import api as packing
from pallas_kernels.packing.layout import Format
from pallas_kernels.sequences import Active, map_sequences


class Softmax(NamedTuple):
    """A softmax in progress: largest logit, sum of exponentials, weighted sum of values."""

    top: jax.Array
    """``[t, heads]``"""
    total: jax.Array
    """``[t, heads]``"""
    acc: jax.Array
    """``[t, heads, width]``"""


def attend_sequences(
    q: Float[Array, "n t heads width"],
    local: Shaped[Array, "n buffer stored"],
    first: Int[Array, " n"],
    sink: Float[Array, " heads"],
    *,
    window: int,
    scale: float,
    rows: BlockRows | None,
    visible: Int[Array, "n t"] | None,
    picks: Int[Array, "n t k"] | None,
    active: Active,
    key_block: int,
    format: Format,
    local_format: Format,
    sequential: bool,
) -> Float[Array, "n t heads width"]:
    """See ``api.attend``."""

    def one(
        q: jax.Array,
        local: jax.Array,
        first: jax.Array,
        table: jax.Array | None,
        visible: jax.Array | None,
        picks: jax.Array | None,
    ) -> jax.Array:
        return attend(
            q,
            local,
            first,
            sink,
            window=window,
            scale=scale,
            rows=None if rows is None or table is None else BlockRows(rows.pool, table),
            visible=visible,
            picks=picks,
            key_block=key_block,
            format=format,
        )

    table = None if rows is None else rows.table
    arguments = (q, packing.decode(local, local_format), first, table, visible, picks)
    return map_sequences(one, arguments, active, sequential=sequential)


def attend(
    q: Float[Array, "t heads width"],
    local: Float[Array, "buffer width"],
    first: Int[Array, ""],
    sink: Float[Array, " heads"],
    *,
    window: int,
    scale: float,
    rows: BlockRows | None,
    visible: Int[Array, " t"] | None,
    picks: Int[Array, "t k"] | None,
    key_block: int,
    format: Format,
) -> Float[Array, "t heads width"]:
    """Of one sequence, whose window rows are decoded; otherwise as ``api.attend``."""
    q = q * scale
    state = attend_window(q, local, first, window)
    if rows is not None:
        assert visible is not None
        if picks is None:
            state = _attend_blocks(q, state, rows, visible, key_block, format)
        else:
            state = _attend_picks(q, state, rows, visible, picks, format)
    return _with_sink(state, sink)


def attend_window(
    q: Float[Array, "t heads width"],
    local: Float[Array, "buffer width"],
    first: Int[Array, ""],
    window: int,
) -> Softmax:
    """The window part: chunks of queries, each against the few rows its band can reach."""
    t, heads, width = q.shape
    keys, mask = _bands(local, first, t, window)
    chunks, size = mask.shape[:2]
    logits = jnp.einsum("gqhc,gkc->gqhk", q.reshape(chunks, size, heads, width), keys)
    logits = jnp.where(mask[:, :, None, :], logits, -jnp.inf)
    top = jnp.max(logits, axis=-1)
    weights = jnp.exp(logits - top[..., None])  # a query always sees its own row: top is finite
    acc = jnp.einsum("gqhk,gkc->gqhc", weights, keys)
    return Softmax(
        top.reshape(t, heads),
        jnp.sum(weights, axis=-1).reshape(t, heads),
        acc.reshape(t, heads, width),
    )


def _bands(
    local: Float[Array, "buffer channels"], first: Int[Array, ""], t: int, window: int
) -> tuple[Float[Array, "chunks reach channels"], Bool[Array, "chunks size reach"]]:
    """The rows that each chunk of queries can reach, and which of them each query sees.

    Rows before the first that exists are zero, by selection.
    """
    size = _query_chunk(t, window)
    chunks, reach = t // size, size + window - 1
    if chunks == 1:
        rows = local[None]
    else:
        at = jnp.arange(chunks)[:, None] * size + jnp.arange(reach)[None, :]
        rows = local[at]
    query, key = jnp.arange(size)[:, None], jnp.arange(reach)[None, :] - (window - 1)
    near = (key <= query) & (key > query - window)
    exists = first + jnp.arange(chunks)[:, None] * size + key >= 0
    mask = near[None] & exists[:, None, :]
    return jnp.where(exists[..., None], rows, 0.0), mask


def _query_chunk(t: int, window: int) -> int:
    """The largest divisor of ``t`` not above the window (or 64, below which chunks cost more)."""
    limit = max(window, 64)
    return next(size for size in range(min(t, limit), 0, -1) if t % size == 0)


def _attend_blocks(
    q: Float[Array, "t heads width"],
    state: Softmax,
    rows: BlockRows,
    visible: Int[Array, " t"],
    key_block: int,
    format: Format,
) -> Softmax:
    """All visible rows, one key block at a time; the trip count is data."""
    size = key_block_rows(rows.rows_per_block, key_block)
    length = visible[-1]

    def body(number: jax.Array, state: Softmax) -> Softmax:
        keys = read_key_block(rows, number, size, length, format)
        row = number * size + jnp.arange(size, dtype=jnp.int32)
        logits = jnp.einsum("thc,kc->thk", q, keys)
        mask = row[None, :] < visible[:, None]
        return _join(state, logits, mask, lambda w: jnp.einsum("thk,kc->thc", w, keys))

    return jax.lax.fori_loop(0, (length + size - 1) // size, body, state)


def _attend_picks(
    q: Float[Array, "t heads width"],
    state: Softmax,
    rows: BlockRows,
    visible: Int[Array, " t"],
    picks: Int[Array, "t k"],
    format: Format,
) -> Softmax:
    """Only the picked rows; how many there can be is fixed, so one block does."""
    mask = picks < visible[:, None]
    keys = read_picked(rows, picks, mask, format)
    logits = jnp.einsum("thc,tkc->thk", q, keys)
    return _join(state, logits, mask, lambda w: jnp.einsum("thk,tkc->thc", w, keys))


def _join(state: Softmax, logits: jax.Array, mask: Bool[Array, "t k"], values) -> Softmax:  # type: ignore[no-untyped-def]
    """Joins one block of logits. A fully masked block leaves every bit of ``state``."""
    logits = jnp.where(mask[:, None, :], logits, -jnp.inf)
    top = jnp.maximum(state.top, jnp.max(logits, axis=-1))
    weights = jnp.exp(logits - top[..., None])
    keep = jnp.exp(state.top - top)
    return Softmax(
        top,
        state.total * keep + jnp.sum(weights, axis=-1),
        state.acc * keep[..., None] + values(weights),
    )


def _with_sink(state: Softmax, sink: Float[Array, " heads"]) -> Float[Array, "t heads width"]:
    top = jnp.maximum(state.top, sink[None, :])
    keep = jnp.exp(state.top - top)
    total = state.total * keep + jnp.exp(sink[None, :] - top)
    return state.acc * (keep / total)[..., None]


def attend_pairs(
    q: Float[Array, "t heads width"],
    rows: BlockRows,
    visible: Int[Array, " t"],
    *,
    kv_heads: int,
    scale: float,
    key_block: int,
    format: Format,
) -> Float[Array, "t heads width"]:
    """See ``api.attend_pairs``."""
    t, heads, width = q.shape
    grouped = (q * scale).reshape(t, kv_heads, heads // kv_heads, width)
    size = key_block_rows(rows.rows_per_block, key_block)
    length = visible[-1]

    def body(number: jax.Array, state: Softmax) -> Softmax:
        pairs = read_key_block(rows, number, size, length, format)
        pairs = pairs.reshape(size, 2, kv_heads, width)
        keys, values = pairs[:, 0], pairs[:, 1]
        logits = jnp.einsum("tngc,knc->tngk", grouped, keys).reshape(t, heads, size)

        def weighted(weights: jax.Array) -> jax.Array:
            by_key_head = weights.reshape(t, kv_heads, heads // kv_heads, size)
            return jnp.einsum("tngk,knc->tngc", by_key_head, values).reshape(t, heads, width)

        row = number * size + jnp.arange(size, dtype=jnp.int32)
        return _join(state, logits, row[None, :] < visible[:, None], weighted)

    state = jax.lax.fori_loop(0, (length + size - 1) // size, body, _nothing(t, heads, width))
    # The largest logit alone adds 1: a smaller total is that of a query which saw nothing.
    return state.acc / jnp.maximum(state.total, 1.0)[..., None]


def _nothing(t: int, heads: int, width: int) -> Softmax:
    """A softmax over no logit. Its top is finite, so that a fully masked block joins without NaN;
    the first real logit gives what is before it the weight ``exp(-huge) = 0``.
    """
    return Softmax(
        jnp.full((t, heads), jnp.finfo(jnp.float32).min, jnp.float32),
        jnp.zeros((t, heads), jnp.float32),
        jnp.zeros((t, heads, width), jnp.float32),
    )


def attend_window_pairs(
    q: Float[Array, "t heads width"],
    local: Float[Array, "buffer channels"],
    first: Int[Array, ""],
    *,
    window: int,
    kv_heads: int,
    scale: float,
) -> Float[Array, "t heads width"]:
    """See ``api.attend_window_pairs``."""
    t, heads, width = q.shape
    pairs, mask = _bands(local, first, t, window)
    chunks, size, reach = mask.shape
    pairs = pairs.reshape(chunks, reach, 2, kv_heads, width)
    keys, values = pairs[:, :, 0], pairs[:, :, 1]
    grouped = (q * scale).reshape(chunks, size, kv_heads, heads // kv_heads, width)
    logits = jnp.einsum("zqngc,zknc->zqngk", grouped, keys)
    logits = jnp.where(mask[:, :, None, None, :], logits, -jnp.inf)
    # A finite top keeps a query that sees nothing from NaN: all its weights are exp(-inf) = 0.
    top = jnp.maximum(jnp.max(logits, axis=-1), jnp.finfo(jnp.float32).min)
    weights = jnp.exp(logits - top[..., None])
    acc = jnp.einsum("zqngk,zknc->zqngc", weights, values).reshape(t, heads, width)
    total = jnp.sum(weights, axis=-1).reshape(t, heads)
    return acc / jnp.maximum(total, 1.0)[..., None]

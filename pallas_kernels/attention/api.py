"""Attention of a few consecutive queries over a window and compressed rows, with a sink.

One softmax covers both parts and the sink, which is a logit without a value (paper section 2.3).
Sums run over the window first, then over compressed rows in key blocks of one size in absolute
order. How many blocks are read is data, so neither the cache's capacity nor masked blocks change
any bit; for one key, row and value are the same vector.

``attend_pairs`` is the plain case, rows of (key, value) pairs alone, summed in the same way;
``attend_window_pairs`` is a window of such rows. Those two take one sequence, and have only the
reference.
"""

import functools
from typing import Any

import jax
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.attention import reference
from pallas_kernels.blocks import BlockRows
from pallas_kernels.implementations import REFERENCE, first_supported
from pallas_kernels.packing.layout import Format
from pallas_kernels.sequences import Active


def attend(
    q: Float[Array, "n t heads width"],
    local: Shaped[Array, "n buffer stored"],
    first: Int[Array, " n"],
    sink: Float[Array, " heads"],
    *,
    window: int,
    scale: float,
    rows: BlockRows | None = None,
    visible: Int[Array, "n t"] | None = None,
    picks: Int[Array, "n t k"] | None = None,
    active: Active | None = None,
    key_block: int = 128,
    format: Format = "float32",
    local_format: Format = "float32",
    sequential: bool = False,
    implementation: str | None = None,
) -> Float[Array, "n t heads width"]:
    """Attention output of ``n`` sequences, float32.

    Args:
      q: float32 queries of positions ``first ... first + t - 1`` of each sequence.
      local: stored window rows of positions ``first - (window - 1) ... first + t - 1``: the buffer
        is ``window - 1 + t`` rows, linear in position.
      first: position of the first query, counted from the first row that exists: earlier rows of
        ``local`` are not read.
      sink: float32 logit per head.
      window: rows a query sees, itself included.
      scale: softmax scale.
      rows: compressed rows of the sequences, or none; the table leads with sequences.
      visible: how many of ``rows`` each query may see; not decreasing along ``t``.
      picks: with routing, the rows to attend, ascending; entries at or past ``visible`` are
        ignored. Without it every visible row is attended.
      active: sequences that have work; all when None. What the others give is finite.
      key_block: rows summed at once. Part of the result's bits.
      format: the stored format of ``rows``.
      local_format: that of ``local``.
      sequential: the reference runs active sequences one after the other, so that idle ones cost
        nothing; off, all at once.
      implementation: see ``pallas_kernels.implementations``.

    Raises:
      NotImplementedError: the named implementation does not support these shapes or formats.
    """
    active = Active.all(q.shape[0]) if active is None else active
    options: dict[str, Any] = {
        "rows": rows,
        "visible": visible,
        "picks": picks,
        "active": active,
        "window": window,
        "scale": scale,
        "key_block": key_block,
        "format": format,
        "local_format": local_format,
    }

    def by_reference() -> jax.Array:
        return reference.attend_sequences(q, local, first, sink, sequential=sequential, **options)

    def by_tpu() -> jax.Array:
        from pallas_kernels.attention import tpu

        return tpu.attend(q, local, first, sink, **options)

    def by_gpu() -> jax.Array:
        from pallas_kernels.attention import gpu

        return gpu.attend(q, local, first, sink, **options)

    candidates = {"tpu": by_tpu, "gpu": by_gpu, REFERENCE: by_reference}
    return first_supported("attention", candidates, implementation)


def attend_pairs(
    q: Float[Array, "t heads width"],
    rows: BlockRows,
    visible: Int[Array, " t"],
    *,
    kv_heads: int,
    scale: float,
    key_block: int = 128,
    format: Format = "float32",
    implementation: str | None = None,
) -> Float[Array, "t heads width"]:
    """Plain grouped-query attention over stored (key, value) rows, float32; no window, no sink.

    One row holds ``[kv_heads, width]`` keys, then as many values, side by side. Query head ``h``
    reads key head ``h // (heads // kv_heads)`` (arXiv 2305.13245).

    Args:
      q: float32 queries, keyed as the stored keys are (rotated where those are).
      rows: rows of the sequence, ``2 * kv_heads * width`` channels each.
      visible: how many of ``rows`` each query may see; not decreasing. A query that sees none
        gives zeros.
      kv_heads: key and value heads of a row.
      scale: softmax scale.
      key_block: rows summed at once. Part of the result's bits.
      format: the stored format of ``rows``.
      implementation: None or ``"reference"``, the only one.

    Raises:
      ValueError: ``heads`` is not a multiple of ``kv_heads``, or another implementation is named.
    """
    if q.shape[1] % kv_heads:
        raise ValueError(f"{q.shape[1]} query heads do not share {kv_heads} key heads evenly")
    by_reference = functools.partial(
        reference.attend_pairs,
        q,
        rows,
        visible,
        kv_heads=kv_heads,
        scale=scale,
        key_block=key_block,
        format=format,
    )
    return first_supported("attend_pairs", {REFERENCE: by_reference}, implementation)


def attend_window_pairs(
    q: Float[Array, "t heads width"],
    local: Float[Array, "buffer channels"],
    first: Int[Array, ""],
    *,
    window: int,
    kv_heads: int,
    scale: float,
    implementation: str | None = None,
) -> Float[Array, "t heads width"]:
    """Grouped-query attention over a window of (key, value) rows, float32; no sink.

    Rows are those of ``attend_pairs``, decoded. All keys that a chunk of queries can reach are
    summed at once; the chunk depends on ``t`` and ``window`` alone.

    Args:
      q: float32 queries of positions ``first ... first + t - 1``.
      local: float32 rows, ``2 * kv_heads * width`` channels, of positions
        ``first - (window - 1) ... first + t - 1``: the buffer is ``window - 1 + t`` rows, linear in
        position. All from the first that exists on must be finite.
      first: position of the first query, counted from the first row that exists: earlier rows of
        ``local`` are not read. A query before it sees nothing and gives zeros.
      window: rows a query sees, itself included.
      kv_heads: key and value heads of a row.
      scale: softmax scale.
      implementation: None or ``"reference"``, the only one.

    Raises:
      ValueError: ``heads`` is not a multiple of ``kv_heads``, ``local`` is not of that shape, or
        another implementation is named.
    """
    t, heads, width = q.shape
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads do not share {kv_heads} key heads evenly")
    form = (window - 1 + t, 2 * kv_heads * width)
    if local.shape != form:
        raise ValueError(f"window rows must be {list(form)}, got {list(local.shape)}")
    by_reference = functools.partial(
        reference.attend_window_pairs,
        q,
        local,
        first,
        window=window,
        kv_heads=kv_heads,
        scale=scale,
    )
    return first_supported("attend_window_pairs", {REFERENCE: by_reference}, implementation)

"""Attention of a few consecutive queries over a window and compressed rows, with a sink.

One softmax covers both parts and the sink, which is a logit without a value (paper section 2.3).
Sums run over the window first, then over compressed rows in key blocks of one size in absolute
order. How many blocks are read is data, so neither the cache's capacity nor masked blocks change
any bit; for one key, row and value are the same vector.
"""

from jaxtyping import Array, Float, Int

from pallas_kernels.attention import reference
from pallas_kernels.blocks import BlockRows


def attend(
    q: Float[Array, "t heads width"],
    local: Float[Array, "buffer width"],
    first: Int[Array, ""],
    sink: Float[Array, " heads"],
    *,
    window: int,
    scale: float,
    rows: BlockRows | None = None,
    visible: Int[Array, " t"] | None = None,
    picks: Int[Array, "t k"] | None = None,
    key_block: int = 128,
    format: str = "float32",
) -> Float[Array, "t heads width"]:
    """Attention output, float32.

    Args:
      q: float32 queries of positions ``first ... first + t - 1``.
      local: float32 window rows of positions ``first - (window - 1) ... first + t - 1``: the buffer
        is ``window - 1 + t`` rows, linear in position. Rows before position 0 must be finite.
      first: position of the first query.
      sink: float32 logit per head.
      window: rows a query sees, itself included.
      scale: softmax scale.
      rows: compressed rows of the sequence, or none.
      visible: how many of ``rows`` each query may see; not decreasing.
      picks: with routing, the rows to attend, ascending; entries at or past ``visible`` are
        ignored. Without it every visible row is attended.
      key_block: rows summed at once. Part of the result's bits.
      format: the stored format of ``rows``.
    """
    return reference.attend(
        q,
        local,
        first,
        sink,
        window=window,
        scale=scale,
        rows=rows,
        visible=visible,
        picks=picks,
        key_block=key_block,
        format=format,
    )

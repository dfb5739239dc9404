"""Index scores and the picks that routed attention reads (paper section 2.3.1)."""

from jaxtyping import Array, Float, Int

from pallas_kernels.blocks import BlockRows
from pallas_kernels.index_scores import reference


def pick_rows(
    queries: Float[Array, "t heads width"],
    weights: Float[Array, "t heads"],
    rows: BlockRows,
    visible: Int[Array, " t"],
    *,
    topk: int,
    key_block: int = 512,
    format: str = "float32",
) -> Int[Array, "t topk"]:
    """The ``topk`` best visible rows of each query, ascending; free places hold ``NO_ROW``.

    ``score = sum_h weights[h] * relu(queries[h] . row)``. Equal scores go to the lowest row, and
    ``-0.0`` counts as ``0.0``. ``visible`` must not decrease. ``format`` is that of ``rows``.
    """
    return reference.pick_rows(
        queries, weights, rows, visible, topk=topk, key_block=key_block, format=format
    )


NO_ROW = reference.NO_ROW
"""int32 that is at or past any length: a pick that is none."""

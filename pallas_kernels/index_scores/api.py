"""Index scores and the picks that routed attention reads (paper section 2.3.1)."""

from typing import Any

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.blocks import BlockRows
from pallas_kernels.implementations import REFERENCE, first_supported
from pallas_kernels.index_scores import reference
from pallas_kernels.packing.layout import Format
from pallas_kernels.sequences import Active


def pick_rows(
    queries: Float[Array, "n t heads width"],
    weights: Float[Array, "n t heads"],
    rows: BlockRows,
    visible: Int[Array, "n t"],
    *,
    topk: int,
    active: Active | None = None,
    key_block: int = 512,
    format: Format = "float32",
    sequential: bool = False,
    implementation: str | None = None,
) -> Int[Array, "n t topk"]:
    """The ``topk`` best visible rows of each query, ascending; free places hold ``NO_ROW``.

    ``score = sum_h weights[h] * relu(queries[h] . row)``. Equal scores go to the lowest row, and
    ``-0.0`` counts as ``0.0``.

    Args:
      queries: of ``n`` sequences, ``t`` consecutive tokens each.
      weights: float32, of each query's heads.
      rows: index rows; the table leads with sequences.
      visible: rows that each query may pick, the first ones; not decreasing along ``t``.
      topk: rows to pick. While no more are visible all are, and nothing is scored.
      active: sequences that have work; all when None. What the others give means nothing.
      key_block: rows scored at once.
      format: the stored format of ``rows``.
      sequential: the reference runs active sequences one after the other; off, all at once.
      implementation: see ``pallas_kernels.implementations``.

    Raises:
      NotImplementedError: the named implementation does not support these shapes or formats.
    """
    active = Active.all(queries.shape[0]) if active is None else active

    options: dict[str, Any] = {
        "topk": topk,
        "active": active,
        "key_block": key_block,
        "format": format,
    }

    def by_reference() -> jax.Array:
        return reference.pick_rows_of_sequences(
            queries, weights, rows, visible, sequential=sequential, **options
        )

    def by_tpu() -> jax.Array:
        from pallas_kernels.index_scores import tpu

        return tpu.pick_rows(queries, weights, rows, visible, **options)

    def by_gpu() -> jax.Array:
        from pallas_kernels.index_scores import gpu

        return gpu.pick_rows(queries, weights, rows, visible, **options)

    candidates = {"tpu": by_tpu, "gpu": by_gpu, REFERENCE: by_reference}
    return first_supported("index scores", candidates, implementation)


NO_ROW = reference.NO_ROW
"""int32 that is at or past any length: a pick that is none."""

"""Kernels on a mesh: each device runs them on its own sequences and heads.

XLA's partitioner cannot split a kernel, so the split is said here, with ``jax.shard_map``, whenever
a step is traced under a mesh (``jax.set_mesh``, axes of type Auto) that has one of these axes:

    axis     attention                 index scores
    data     sequences                 sequences
    model    heads                     whole: the sum over index heads stays on one device

Pools stand whole on every device, which writes all new rows to its own; so no kernel waits for
another device. An axis that does not divide a size splits nothing: each of its devices does the
same. Without a mesh kernels are called as they are.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Shaped

from hybridkv.errors import UserError
from pallas_kernels.attention import api as attention_kernel
from pallas_kernels.blocks import BlockRows
from pallas_kernels.index_scores import api as index_kernel
from pallas_kernels.moves import api as moves_kernel
from pallas_kernels.sequences import Active

Kernel = Callable[..., jax.Array]
SEQUENCES, HEADS = "data", "model"
"""Mesh axes."""


def on_mesh() -> bool:
    """Whether this is traced under a mesh of several devices.

    Raises:
      UserError: types of that mesh's axes are explicit: steps leave the rest of the split to XLA.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size <= 1:
        return False
    if AxisType.Explicit in mesh.axis_types:
        raise UserError(
            f"axes {mesh.axis_names} of the mesh are explicit: make it with "
            f"axis_types=(jax.sharding.AxisType.Auto,) * {len(mesh.axis_names)}"
        )
    return True


def attend(
    q: Float[Array, "n t heads width"],
    local: Shaped[Array, "n buffer stored"],
    first: Int[Array, " n"],
    sink: Float[Array, " heads"],
    *,
    rows: BlockRows | None,
    visible: Int[Array, "n t"] | None,
    picks: Int[Array, "n t k"] | None,
    active: Active,
    **options: Any,
) -> Float[Array, "n t heads width"]:
    """``pallas_kernels.attention.api.attend``, split over the mesh there is."""
    attend_here: Kernel = functools.partial(attention_kernel.attend, **options)
    asked: dict[str, Any] = {"rows": rows, "visible": visible, "picks": picks}
    if not on_mesh():
        return attend_here(q, local, first, sink, active=active, **asked)

    def one(
        q: jax.Array,
        local: jax.Array,
        first: jax.Array,
        sink: jax.Array,
        mask: Bool[Array, " n"],
        asked: dict[str, Any],
    ) -> jax.Array:
        return attend_here(q, local, first, sink, active=Active.of(mask), **asked)

    n, heads = _axis(SEQUENCES, q.shape[0]), _axis(HEADS, q.shape[2])
    each, by_head = PartitionSpec(n), PartitionSpec(n, None, heads)
    asked_at = {"rows": _rows_at(rows, n), "visible": each, "picks": each}
    where = (by_head, each, each, PartitionSpec(heads), each, asked_at)
    return _split(one, where, by_head)(q, local, first, sink, active.mask, asked)


def pick_rows(
    queries: Float[Array, "n t index_heads width"],
    weights: Float[Array, "n t index_heads"],
    rows: BlockRows,
    visible: Int[Array, "n t"],
    *,
    active: Active,
    **options: Any,
) -> Int[Array, "n t k"]:
    """``pallas_kernels.index_scores.api.pick_rows``, split over the mesh there is."""
    pick_here: Kernel = functools.partial(index_kernel.pick_rows, **options)
    if not on_mesh():
        return pick_here(queries, weights, rows, visible, active=active)

    def one(
        queries: jax.Array,
        weights: jax.Array,
        rows: BlockRows,
        visible: jax.Array,
        mask: Bool[Array, " n"],
    ) -> jax.Array:
        return pick_here(queries, weights, rows, visible, active=Active.of(mask))

    n = _axis(SEQUENCES, queries.shape[0])
    each = PartitionSpec(n)
    where = (each, each, _rows_at(rows, n), each, each)
    return _split(one, where, each)(queries, weights, rows, visible, active.mask)


def write_rows(
    pool: Shaped[Array, "blocks rows stored"],
    table: Int[Array, "n blocks_per_sequence"],
    numbers: Int[Array, "n count"],
    whole: Bool[Array, "n count"],
    rows: Shaped[Array, "n count stored"],
    *,
    implementation: str | None,
) -> Shaped[Array, "blocks rows stored"]:
    """``pallas_kernels.moves.api.write_rows``: each device writes all rows to its own pool."""
    write = functools.partial(moves_kernel.write_rows, implementation=implementation)
    if not on_mesh():
        return write(pool, table, numbers, whole, rows)
    whole_everywhere = PartitionSpec()
    return _split(write, (whole_everywhere,) * 5, whole_everywhere)(
        pool, table, numbers, whole, rows
    )


def _axis(name: str, size: int) -> str | None:
    """The mesh axis, where there is one and ``size`` can be split over it."""
    across = jax.sharding.get_abstract_mesh().shape.get(name, 1)
    return name if across > 1 and size % across == 0 else None


def _rows_at(rows: BlockRows | None, n: str | None) -> BlockRows | None:
    if rows is None:
        return None
    whole: Any = PartitionSpec()
    table: Any = PartitionSpec(n)
    return BlockRows(whole, table)


def _split(
    function: Callable[..., jax.Array], where: tuple[Any, ...], out: PartitionSpec
) -> Callable[..., jax.Array]:
    # A kernel's outputs do not say over which axes they vary, so that it is not checked.
    return jax.shard_map(function, in_specs=where, out_specs=out, check_vma=False)

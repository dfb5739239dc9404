"""Pallas TPU implementation of ``pool_cells``: one pass over the tokens, cells in sublanes.

With a ratio below a register's eight sublanes, slot ``r`` of many cells is one strided load, and a
softmax runs over registers, without any reduction inside one:

    tokens [cells * ratio, 128] --every ratio-th row from r--> slot r of all cells [cells, 128]

The half of the channels that goes to the next cell is shifted down by one cell; the last cell of a
grid step is kept for the next step. Larger ratios reduce each cell's own rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.interpreting import interpret_params

if TYPE_CHECKING:
    from pallas_kernels.compression.api import Earlier

Ref = Any
_LANES, _SUBLANES = 128, 8
_BLOCK_BYTES = 2**20
"""Of one array's block; four arrays, twice buffered, fit any core's VMEM."""


def pool_cells(
    kv: Float[Array, "cells ratio channels"],
    gate: Float[Array, "cells ratio channels"],
    earlier: Earlier | None,
) -> Float[Array, "cells width"]:
    """See ``api.pool_cells``. A row's bits depend on nothing but its own cell and the one before.

    Raises:
      NotImplementedError: channels that are not whole registers, or so few cells that they do not
        fill one.
    """
    cells, ratio, channels = kv.shape
    width = channels if earlier is None else channels // 2
    _check(kv, gate, width)
    step = _cells_of_a_step(cells, ratio * _LANES * 4)
    lanes = width // _LANES

    def tokens(offset: int) -> pl.BlockSpec:
        """Lanes of the tokens of a step's cells, ``offset`` registers further."""
        return pl.BlockSpec((step * ratio, _LANES), lambda lane, i: (i, lane + offset))

    flat = [x.reshape(cells * ratio, channels) for x in (kv, gate)]
    arrays, specs, scratch = flat, [tokens(0)] * 2, []
    kernel: Callable[..., None] = _plain
    if earlier is not None:
        kernel = _overlapped
        first = [
            jnp.where(earlier.exists, earlier.kv, 0.0),
            jnp.where(earlier.exists, earlier.gate, -jnp.inf),
        ]
        arrays = [*flat, *flat, *first]
        whole = pl.BlockSpec((ratio, _LANES), lambda lane, i: (0, lane))
        specs = [tokens(lanes)] * 2 + [tokens(0)] * 2 + [whole] * 2
        scratch = [pltpu.VMEM((ratio, _LANES), jnp.float32)] * 2
    return pl.pallas_call(
        lambda *refs: kernel(ratio, *refs),
        out_shape=jax.ShapeDtypeStruct((cells, width), jnp.float32),
        grid=(lanes, cells // step),
        in_specs=specs,
        out_specs=pl.BlockSpec((step, _LANES), lambda lane, i: (i, lane)),
        scratch_shapes=scratch,
        # No dimension semantics: a caller's vmap adds an axis to the grid.
        compiler_params=pltpu.CompilerParams(disable_bounds_checks=True),
        interpret=interpret_params(),
        name="pool_cells",
    )(*arrays)


def _check(kv: jax.Array, gate: jax.Array, width: int) -> None:
    cells, ratio, _ = kv.shape
    if kv.dtype != jnp.float32 or gate.dtype != jnp.float32:
        raise NotImplementedError(f"cells of {kv.dtype} and {gate.dtype}, not float32")
    if width % _LANES:
        raise NotImplementedError(f"rows of {width} channels, not a multiple of {_LANES}")
    small = ratio < _SUBLANES
    if cells == 0 or (small and cells % _SUBLANES) or (not small and ratio % _SUBLANES):
        raise NotImplementedError(f"{cells} cells of {ratio} tokens: not whole registers")


def _cells_of_a_step(cells: int, cell_bytes: int) -> int:
    """The most cells that divide the work evenly and fit: all, or a multiple of 8."""
    if cells * cell_bytes <= _BLOCK_BYTES:
        return cells
    for count in range(_BLOCK_BYTES // cell_bytes // _SUBLANES * _SUBLANES, 0, -_SUBLANES):
        if cells % count == 0:
            return count
    raise NotImplementedError(f"{cells} cells of {cell_bytes} bytes do not fit in VMEM evenly")


def _plain(ratio: int, kv: Ref, gate: Ref, out: Ref) -> None:
    """Cells without overlap."""
    if ratio < _SUBLANES:
        out[...] = _pooled(_slots(kv, ratio), _slots(gate, ratio))
        return
    rows = [_whole_cell(kv, gate, cell, ratio) for cell in range(out.shape[0])]
    out[...] = jnp.concatenate(rows, axis=0)


def _whole_cell(kv: Ref, gate: Ref, cell: int, ratio: int) -> jax.Array:
    """The row of a cell whose tokens fill registers, ``[1, 128]``."""
    tokens = pl.ds(cell * ratio, ratio)
    logits = gate[tokens, :]
    weights = jnp.exp(logits - jnp.max(logits, axis=0, keepdims=True))
    total = jnp.sum(weights, axis=0, keepdims=True)
    return jnp.sum(weights * kv[tokens, :], axis=0, keepdims=True) / total


def _overlapped(
    ratio: int,
    own_kv: Ref,
    own_gate: Ref,
    given_kv: Ref,
    given_gate: Ref,
    first_kv: Ref,
    first_gate: Ref,
    out: Ref,
    last_kv: Ref,
    last_gate: Ref,
) -> None:
    """Cells that also pool the cell before them; ``last`` is carried from step to step."""

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        last_kv[...] = first_kv[...]
        last_gate[...] = first_gate[...]

    values = _before(given_kv, last_kv, ratio) + _slots(own_kv, ratio)
    logits = _before(given_gate, last_gate, ratio) + _slots(own_gate, ratio)
    out[...] = _pooled(values, logits)
    end = pl.ds(given_kv.shape[0] - ratio, ratio)
    last_kv[...] = given_kv[end, :]
    last_gate[...] = given_gate[end, :]


def _slots(tokens: Ref, ratio: int) -> list[jax.Array]:
    """Slot ``r`` of all cells, ``[cells, 128]``, for every ``r``."""
    cells = tokens.shape[0] // ratio
    return [tokens[pl.ds(r, cells, stride=ratio), :] for r in range(ratio)]


def _before(tokens: Ref, last: Ref, ratio: int) -> list[jax.Array]:
    """Slot ``r`` of the cell before each cell, for every ``r``."""
    parts = []
    for r, slot in enumerate(_slots(tokens, ratio)):
        top = jax.lax.broadcasted_iota(jnp.int32, slot.shape, 0) == 0
        parts.append(jnp.where(top, last[pl.ds(r, 1), :], pltpu.roll(slot, 1, axis=0)))
    return parts


def _pooled(values: list[jax.Array], logits: list[jax.Array]) -> jax.Array:
    """The softmax of the slots' logits over their values, elementwise."""
    top = logits[0]
    for logit in logits[1:]:
        top = jnp.maximum(top, logit)
    total = jnp.zeros_like(top)
    weighted = jnp.zeros_like(top)
    for value, logit in zip(values, logits, strict=True):
        weight = jnp.exp(logit - top)  # own gates are finite, so top is
        total += weight
        weighted += weight * value
    return weighted / total

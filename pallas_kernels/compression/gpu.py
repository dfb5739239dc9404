"""Pallas implementation of ``pool_cells`` for NVIDIA GPUs, through Triton (see ``attention.gpu``).

One program pools one cell over a group of channels: every input is read once, except the half that
a cell gives to the next one.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from pallas_kernels.interpreting import interpret_params

if TYPE_CHECKING:
    from pallas_kernels.compression.api import Earlier

GROUP = 64
"""Most channels of one program."""


def pool_cells(
    kv: Float[Array, "cells ratio channels"],
    gate: Float[Array, "cells ratio channels"],
    earlier: Earlier | None,
) -> Float[Array, "cells width"]:
    """See ``api.pool_cells``.

    Raises:
      NotImplementedError: inputs that are not float32, no cell at all, or a cell that does not fit.
    """
    cells, ratio, channels = kv.shape
    if kv.dtype != jnp.float32 or gate.dtype != jnp.float32:
        raise NotImplementedError(f"the GPU kernel pools float32, not {kv.dtype} and {gate.dtype}")
    if cells == 0:
        raise NotImplementedError("no cell to pool")
    if ratio > 256:
        raise NotImplementedError(f"a cell of {ratio} tokens does not fit one program: at most 256")
    width = channels if earlier is None else channels // 2
    group = min(pl.next_power_of_2(width), GROUP)
    before = None
    if earlier is not None:
        before = (earlier.kv, earlier.gate, earlier.exists.astype(jnp.int32).reshape(1))
    leaves, tree = jax.tree.flatten((kv, gate, before))

    def program(*refs: Any) -> None:
        kv, gate, before = jax.tree.unflatten(tree, refs[:-1])
        pool_program(kv, gate, before, refs[-1], width=width, group=group)

    return pl.pallas_call(
        program,
        grid=(cells, pl.cdiv(width, group)),
        out_shape=jax.ShapeDtypeStruct((cells, width), jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=bool(interpret_params()),
        name="pool_cells",
    )(*leaves)


def pool_program(kv, gate, before, out, *, width: int, group: int) -> None:  # type: ignore[no-untyped-def]
    """Pools one cell over ``group`` channels; refs are those of ``api.pool_cells``."""
    cell = pl.program_id(0)
    channel = pl.program_id(1) * group + jnp.arange(group, dtype=jnp.int32)
    ratio = kv.shape[1]
    token = jnp.arange(pl.next_power_of_2(ratio), dtype=jnp.int32)
    inside = (token < ratio)[:, None] & (channel < width)[None, :]
    own = 0 if before is None else width
    read = partial(_read, token=token, inside=inside)
    values, gates = read(kv, cell, channel + own), read(gate, cell, channel + own)
    gates = jnp.where(inside, gates, -jnp.inf)
    top = jnp.max(gates, axis=0)
    if before is not None:
        first_kv, first_gate, exists = before
        first = (cell == 0) & (exists[0] != 0) & inside
        later = (cell > 0) & inside
        near = jnp.maximum(cell - 1, 0)
        old_kv = read(kv, near, channel, inside=later) + read(first_kv, None, channel, inside=first)
        old_gate = read(gate, near, channel, inside=later)
        old_gate = jnp.where(first, read(first_gate, None, channel, inside=first), old_gate)
        old_gate = jnp.where(first | later, old_gate, -jnp.inf)
        top = jnp.maximum(top, jnp.max(old_gate, axis=0))
    top = jnp.where(channel < width, top, 0.0)  # a channel that does not exist has no gate
    weights = jnp.exp(gates - top[None, :])
    total, acc = jnp.sum(weights, axis=0), jnp.sum(weights * values, axis=0)
    if before is not None:
        weights = jnp.exp(old_gate - top[None, :])
        total, acc = total + jnp.sum(weights, axis=0), acc + jnp.sum(weights * old_kv, axis=0)
    total = jnp.where(channel < width, total, 1.0)
    cells = jnp.broadcast_to(cell, channel.shape)
    plt.store(out.at[cells, channel], acc / total, mask=channel < width)


def _read(
    ref: Any, cell: jax.Array | None, channel: jax.Array, *, token: jax.Array, inside: jax.Array
) -> jax.Array:
    """Values ``[tokens, group]`` of a cell; zero where not inside, whatever lies there."""
    form = inside.shape
    at: Any = (jnp.broadcast_to(token[:, None], form), jnp.broadcast_to(channel[None, :], form))
    if cell is not None:
        at = (jnp.broadcast_to(cell, form), *at)
    return plt.load(ref.at[at], mask=inside, other=0.0)

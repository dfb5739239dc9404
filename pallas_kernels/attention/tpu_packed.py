"""Packed rows in the TPU attention kernel: copied as bytes, decoded where they have arrived.

    HBM --bytes--> keys, local --decode--> rows [key blocks or window, width] --> matrix unit

Key blocks and the window have a decoder each, as each may have a format of its own.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.attention.tpu_plan import Plan
from pallas_kernels.packing.layout import RowLayout
from pallas_kernels.packing.tpu_rows import UNIT, Decoder, Scratch, chip, clear

Ref = Any


class Side(NamedTuple):
    """The decoder of key blocks, or of the window."""

    decoder: Decoder
    rows: Ref
    """int32 ``[rows / 2, width]``: bfloat16, two rows a word."""
    scratch: Scratch

    def put(self, stored: Ref, first: Any, rows: int, place: int = 0) -> None:
        """Decodes stored rows.

        Args:
          stored: uint8 ``[groups, group, stored]``.
          first: the first group.
          rows: how many, a multiple of 32.
          place: where their values are put, counted in so many rows.
        """
        groups = UNIT // stored.shape[1]

        def load(unit: int) -> jax.Array:
            """The stored rows of a unit."""
            part = stored[pl.ds(first + unit * groups, groups)]
            return part.reshape(UNIT, part.shape[-1])

        words = slice(place * rows // 2, (place + 1) * rows // 2)
        scratch = self.scratch
        if not self.decoder.chip.halves:
            scratch = scratch._replace(factors=scratch.factors.at[words])
        self.decoder.decode(load, rows, self.rows.at[words], scratch)

    def get(self, rows: int, place: int = 0) -> jax.Array:
        """bfloat16 ``[rows, width]``: the values that were put at ``place``."""
        words = self.rows[place * rows // 2 : (place + 1) * rows // 2, :]
        return pltpu.bitcast(words, jnp.bfloat16)


def shapes(plan: Plan) -> list[Any]:
    """Fast memory of both sides."""
    found = []
    for layout, rows in _layouts(plan):
        if layout is not None:
            found.append(pltpu.VMEM((rows // 2, layout.width), jnp.int32))
            found += Decoder(layout, chip()).scratch(rows)
    return found


def sides(plan: Plan, refs: tuple[Ref, ...]) -> tuple[Side | None, Side | None]:
    """Key blocks and window, from memory of ``shapes``; None where rows are not packed."""
    found: list[Side | None] = []
    for layout, _ in _layouts(plan):
        if layout is None:
            found.append(None)
            continue
        own, refs = refs[:3], refs[3:]
        found.append(Side(Decoder(layout, chip()), own[0], Scratch(*own[1:])))
    return found[0], found[1]


def memory(plan: Plan) -> int:
    """Bytes of ``shapes``."""
    return sum(
        layout.width * 2 * (rows + 128) + 2 * rows * 128
        for layout, rows in _layouts(plan)
        if layout is not None
    )


def clear_block(keys: Ref, first: int, size: int, length: Any) -> None:
    """Zeroes the bytes of rows from ``length`` on, of ``size`` rows from a group on."""
    groups = UNIT // keys.shape[1]

    def some(unit: jax.Array, _: None) -> None:
        """The rows of a unit."""
        part = keys.at[pl.ds(first + unit * groups, groups)]
        stored = part[...]
        rows = clear(stored.reshape(UNIT, stored.shape[-1]), length - unit * UNIT)
        part[...] = rows.reshape(stored.shape)

    jax.lax.fori_loop(jax.lax.div(length, jnp.int32(UNIT)), size // UNIT, some, None)


def _layouts(plan: Plan) -> tuple[tuple[RowLayout | None, int], tuple[RowLayout | None, int]]:
    return (plan.rows.packed, plan.rows.item), (plan.local_packed, plan.window_rows)

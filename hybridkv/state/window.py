"""WINDOW: the last raw rows of every windowed layer.

A ring of ``window`` rows a slot: the row of position ``p`` stands at ``p % window``. Of them the
last ``window - 1`` are the state; the oldest is overwritten by the next token before it is read.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from hybridkv.geometry import Geometry
from hybridkv.state import per_device
from hybridkv.state.capacity import Capacity
from hybridkv.state.layouts import window_layout
from hybridkv.state.leaf import Leaf
from pallas_kernels.implementations import REFERENCE
from pallas_kernels.moves import api as moves
from pallas_kernels.packing import api as packing


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowRows:
    """One ring a windowed layer, ``[slots, window, stored]``; none elsewhere."""

    layers: tuple[Shaped[Array, "slots window stored"] | None, ...]

    @classmethod
    def declare(cls, geometry: Geometry, capacity: Capacity) -> "WindowRows":
        """The rings' declarations."""
        form = packing.stored_form(window_layout(geometry))

        def ring(window: int) -> Any:
            return Leaf(
                shape=(capacity.slots, window, *form.shape),
                dtype=form.dtype,
                axes=("slots", None, "width"),
            )

        return cls(layers=tuple(ring(x.window) if x.window else None for x in geometry.layers))


def write_token(
    rings: Shaped[Array, "slots window stored"],
    slots: Int[Array, " n"],
    positions: Int[Array, " n"],
    rows: Shaped[Array, "n stored"],
    *,
    kernels: str | None = REFERENCE,
) -> Shaped[Array, "slots window stored"]:
    """The rings with one more row in each of ``slots``, those past the end left out.

    Args:
      rings: of one layer.
      slots: int32, each at most once.
      positions: int32, of the rows.
      rows: stored rows.
      kernels: that of ``StepOptions``. Rings that it has no code for are written by XLA, which may
        copy them: attention takes windows of any size and format, and rings are small. On a mesh,
        where slots are spread over devices, XLA writes them too.
    """
    kernels = REFERENCE if per_device.on_mesh() else kernels
    place = (positions % rings.shape[1])[:, None]
    there = jnp.ones_like(place, bool)
    try:
        return moves.write_rows(
            rings, slots[:, None], place, there, rows[:, None], implementation=kernels
        )
    except NotImplementedError:
        return rings.at[slots, place[:, 0]].set(rows, mode="drop")


def read_window(
    ring: Shaped[Array, "n window stored"],
    end: Int[Array, " n"],
    count: int,
    known_from: Int[Array, " n"] | None = None,
) -> Shaped[Array, "n count stored"]:
    """The ``count`` rows before position ``end``, oldest first.

    Rows before position ``known_from`` (0 without it) are zero, by selection.
    """
    window = ring.shape[1]
    position = end[:, None] + jnp.arange(-count, 0, dtype=jnp.int32)[None, :]
    rows = jnp.take_along_axis(ring, (position % window)[..., None], axis=1)
    first = jnp.zeros_like(end) if known_from is None else known_from
    known = position >= first[:, None]
    return jnp.where(known[..., None], rows, jnp.zeros((), ring.dtype))


def ring_after(
    buffer: Shaped[Array, "n buffer stored"],
    ring: Shaped[Array, "n window stored"],
    first: Int[Array, " n"],
    end: Int[Array, " n"],
) -> Shaped[Array, "n window stored"]:
    """The ring at position ``end`` (not before ``first``).

    ``buffer`` holds the rows of positions ``first - (window - 1) ...``, as attention reads them.
    Places whose row is older than the buffer keep what they hold.
    """
    window = ring.shape[1]
    place = jnp.arange(window, dtype=jnp.int32)[None, :]
    position = end[:, None] - 1 - (end[:, None] - 1 - place) % window
    at = position - first[:, None] + window - 1
    rows = jnp.take_along_axis(buffer, jnp.maximum(at, 0)[..., None], axis=1)
    return jnp.where(((at >= 0) & (position >= 0))[..., None], rows, ring)

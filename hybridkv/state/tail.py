"""TAIL: what a compressor needs of tokens whose cell is not complete, or was the last one.

Token ``t``'s (kv, gate) stands at ``t % ratio`` of the open cell; gates carry their position bias.
How many of them count is ``length % ratio``, never inferred from the bytes. ``earlier`` is the
half of the last complete cell that the next row pools too: at block and tile boundaries the open
cell is empty, the overlap never is.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hybridkv.geometry import Geometry, LayerGeometry
from hybridkv.state.capacity import Capacity
from hybridkv.state.leaf import Leaf


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class CompressorTail:
    """State of one compressor, float32."""

    kv: Float[Array, "slots ratio channels"]
    gate: Float[Array, "slots ratio channels"]
    earlier_kv: Float[Array, "slots ratio width"] | None
    earlier_gate: Float[Array, "slots ratio width"] | None

    @classmethod
    def declare(cls, layer: LayerGeometry, width: int, capacity: Capacity) -> "CompressorTail":
        """The declarations of a compressor that makes rows of ``width`` channels."""

        def leaf(channels: int) -> Any:
            return Leaf(
                shape=(capacity.slots, layer.ratio, channels),
                dtype=jnp.float32,
                axes=("slots", None, "width"),
            )

        return cls(
            kv=leaf(width * layer.state_halves),
            gate=leaf(width * layer.state_halves),
            earlier_kv=leaf(width) if layer.overlap else None,
            earlier_gate=leaf(width) if layer.overlap else None,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Tails:
    """The main and the index compressor of every layer; none where a layer has none."""

    main: tuple[CompressorTail | None, ...]
    index: tuple[CompressorTail | None, ...]

    @classmethod
    def declare(cls, geometry: Geometry, capacity: Capacity) -> "Tails":
        """The tails' declarations."""
        return cls(
            main=tuple(
                CompressorTail.declare(layer, geometry.row_width, capacity)
                if layer.compresses
                else None
                for layer in geometry.layers
            ),
            index=tuple(
                CompressorTail.declare(layer, geometry.index_width, capacity)
                if layer.compresses and layer.indexed
                else None
                for layer in geometry.layers
            ),
        )


def tail_after(
    kv: Float[Array, "n t channels"],
    gate: Float[Array, "n t channels"],
    tail: CompressorTail,
    first: Int[Array, " n"],
    end: Int[Array, " n"],
) -> CompressorTail:
    """The tail at ``end`` after tokens ``first ... end - 1``; ``first`` is a cell boundary."""
    ratio = tail.kv.shape[1]
    done = (end - first) // ratio
    open_at = done[:, None] * ratio + jnp.arange(ratio, dtype=jnp.int32)[None, :]
    open_at = jnp.minimum(open_at, kv.shape[1] - 1)[..., None]
    earlier_kv, earlier_gate = tail.earlier_kv, tail.earlier_gate
    if earlier_kv is not None and earlier_gate is not None:
        earlier_kv = _last_cell(kv, earlier_kv, done)
        earlier_gate = _last_cell(gate, earlier_gate, done)
    return CompressorTail(
        kv=jnp.take_along_axis(kv, open_at, axis=1),
        gate=jnp.take_along_axis(gate, open_at, axis=1),
        earlier_kv=earlier_kv,
        earlier_gate=earlier_gate,
    )


def _last_cell(
    x: Float[Array, "n t channels"], earlier: Float[Array, "n ratio width"], done: Int[Array, " n"]
) -> Float[Array, "n ratio width"]:
    """The overlap half of the last of ``done`` complete cells; ``earlier`` where there is none."""
    ratio, width = earlier.shape[1:]
    at = (done[:, None] - 1) * ratio + jnp.arange(ratio, dtype=jnp.int32)[None, :]
    rows = jnp.take_along_axis(x[..., :width], jnp.maximum(at, 0)[..., None], axis=1)
    return jnp.where((done > 0)[:, None, None], rows, earlier)

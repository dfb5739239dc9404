"""Attention of plain key and value heads over the cache, the same for tile and decode steps.

    q, k, v of this step's tokens, [n, t, heads, width]
      |   k, v --encode--> rows --write--> pool (full attention)  or  ring (a window)
      |                                      |
      +--------------- attend <---decode-----+     every key is read back as it was stored

``attend_full`` and ``attend_window`` are pure functions of one layer's share of the cache.
``Attend`` is what a model's own layers call: it holds all shares while one step is traced.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from hybridkv.errors import UserError
from hybridkv.geometry import Geometry, LayerGeometry
from hybridkv.state.batch import StepOptions
from hybridkv.state.cache import Cache, LayerCache
from hybridkv.state.compressed import write_rows
from hybridkv.state.layouts import row_layout, window_layout
from hybridkv.state.tokens import Tokens
from hybridkv.state.window import read_window, ring_after
from pallas_kernels.attention import api as kernel
from pallas_kernels.blocks import BlockRows
from pallas_kernels.packing import api as packing
from pallas_kernels.sequences import map_sequences


class Attend:
    """Stores and attends each layer of one step: ``o = attend(layer, q, k, v)``.

    Lives while a step is traced, in which each layer of the geometry calls it once, in a Python
    loop: inside ``jax.lax.scan``, ``nn.scan`` or ``jax.checkpoint`` the cache could not come out.
    """

    def __init__(self, tokens: Tokens, cache: Cache, options: StepOptions) -> None:
        self.tokens = tokens
        self._cache, self._options = cache, options
        self._layers = [cache.layer(number) for number in range(len(cache.geometry.layers))]
        self._called: set[int] = set()

    def __call__(
        self,
        layer: int,
        q: Float[Array, "n t heads width"],
        k: Float[Array, "n t kv_heads width"] | None = None,
        v: Float[Array, "n t kv_heads width"] | None = None,
        *,
        kv_heads: int | None = None,
        scale: float | None = None,
    ) -> Float[Array, "n t heads width"]:
        """What the queries of ``layer`` attend to: its window, or all tokens up to their own.

        Query head ``h`` reads key head ``h // (heads // kv_heads)``. Sums are in float32.

        Args:
          layer: number of the layer in the geometry.
          q: queries, rotated where the keys are.
          k: keys, rotated to their positions. None in a layer that reads the rows of another.
          v: values.
          kv_heads: key heads of the rows, needed where there is no ``k``.
          scale: softmax scale; ``width ** -0.5`` when None.

        Returns:
          Outputs in the dtype of ``q``; of padding, anything finite.

        Raises:
          UserError: the call does not fit the geometry; the message says how.
        """
        geometry = self._cache.geometry
        if not isinstance(layer, int) or not 0 <= layer < len(self._layers):
            raise UserError(
                f"attend was called for layer {layer!r}: pass the layer's number as an int from 0 "
                f"to {len(self._layers) - 1}, in a Python loop over layers and not inside a scan"
            )
        if layer in self._called:
            raise UserError(f"layer {layer} called attend twice: each layer attends once a step")
        self._called.add(layer)
        form, owner = geometry.layers[layer], geometry.owner(layer)
        check_plain(layer, form)
        rows, kv_heads = _rows(layer, geometry, q, k, v, kv_heads)
        function = attend_window if form.window else attend_full
        share = self._layers[layer]
        if owner != layer:
            if owner not in self._called:
                raise UserError(f"layer {layer} reads rows of layer {owner}: call that one first")
            share = dataclasses.replace(share, rows=self._layers[owner].rows)
        o, self._layers[layer] = function(
            self.tokens,
            share,
            q.astype(jnp.float32),
            rows,
            geometry=geometry,
            options=self._options,
            kv_heads=kv_heads,
            scale=q.shape[-1] ** -0.5 if scale is None else scale,
        )
        return o.astype(q.dtype)

    def cache(self) -> Cache:
        """The cache after the step.

        Raises:
          UserError: a layer of the geometry did not attend.
        """
        missing = sorted(set(range(len(self._layers))) - self._called)
        if missing:
            raise UserError(
                f"layers {missing} of the geometry did not call attend: call it once in each, or "
                "declare fewer layers"
            )
        lengths = self.tokens.lengths(self._cache.lengths)
        return self._cache.with_layers(tuple(self._layers), lengths)


def check_plain(layer: int, form: LayerGeometry) -> None:
    """Refuses a layer whose rows are not one (key, value) row a token.

    Raises:
      UserError: it compresses, routes, or attends to a window and rows at once.
    """
    if form.ratio > 1 or form.indexed or bool(form.window) == bool(form.ratio):
        raise UserError(
            f"layer {layer} is {form}: attend knows LayerGeometry(window=W) and "
            "LayerGeometry(ratio=1); a layer that compresses or routes needs its own step"
        )


def _rows(
    layer: int,
    geometry: Geometry,
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    kv_heads: int | None,
) -> tuple[jax.Array | None, int]:
    """The tokens' rows, keys before values, and how many key heads they have."""
    width, borrows = q.shape[-1], geometry.owner(layer) != layer
    if (k is None) != borrows or (k is None) != (v is None):
        raise UserError(
            f"layer {layer} must {'not ' if borrows else ''}give k and v: it "
            + (f"reads rows of layer {geometry.owner(layer)}" if borrows else "stores its own rows")
        )
    if k is None or v is None:
        if kv_heads is None:
            raise UserError(f"layer {layer} gives no k: pass kv_heads, the key heads of the rows")
    elif k.shape != v.shape or k.shape[:2] + k.shape[3:] != q.shape[:2] + q.shape[3:]:
        raise UserError(
            f"layer {layer}: q, k, v must be [n, t, heads, width] and [n, t, kv_heads, width] "
            f"twice, got {list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
        )
    else:
        kv_heads = k.shape[2]
    if 2 * kv_heads * width != geometry.row_width:
        raise UserError(
            f"layer {layer} has {kv_heads} key heads of width {width}; the geometry needs "
            f"row_width={2 * kv_heads * width}, keys and values, and has {geometry.row_width}"
        )
    if q.shape[2] % kv_heads:
        raise UserError(
            f"layer {layer}: {q.shape[2]} query heads do not share {kv_heads} key heads evenly"
        )
    if k is None or v is None:
        return None, kv_heads
    flat = (*k.shape[:2], kv_heads * width)
    return jnp.concatenate([k.reshape(flat), v.reshape(flat)], axis=-1), kv_heads


def attend_full(
    tokens: Tokens,
    layer: LayerCache,
    q: Float[Array, "n t heads width"],
    rows: Float[Array, "n t row_width"] | None,
    *,
    geometry: Geometry,
    options: StepOptions,
    kv_heads: int,
    scale: float,
) -> tuple[Float[Array, "n t heads width"], LayerCache]:
    """Stores ``rows`` in the blocks, then attends to all rows up to each query's own.

    Args:
      tokens: the step's tokens.
      layer: the layer's share of the cache.
      q: float32 queries.
      rows: keys, then values, of each token; None where ``layer.rows`` holds them already.
      geometry: of the cache.
      options: of the step.
      kv_heads: key heads of a row.
      scale: softmax scale.

    Returns:
      float32 outputs, zeros for idle sequences, and the share after the step.
    """
    assert layer.rows is not None
    layout, pool = row_layout(geometry), layer.rows
    if rows is not None:
        write = tokens.real & (tokens.numbers >= tokens.write_from[:, None])
        pool = write_rows(pool, tokens.table, tokens.numbers, write, packing.encode(rows, layout))

    def one(q: jax.Array, table: jax.Array, visible: jax.Array) -> jax.Array:
        return kernel.attend_pairs(
            q,
            BlockRows(pool, table),
            visible,
            kv_heads=kv_heads,
            scale=scale,
            key_block=options.key_block,
            format=layout.format,
            implementation=options.kernels,
        )

    visible = jnp.where(tokens.ends > tokens.starts, tokens.ends, 0)[:, None]
    arguments = (q, tokens.table, jnp.minimum(tokens.numbers + 1, visible))
    o = map_sequences(one, arguments, tokens.active, sequential=options.sequential)
    return o, dataclasses.replace(layer, rows=pool)


def attend_window(
    tokens: Tokens,
    layer: LayerCache,
    q: Float[Array, "n t heads width"],
    rows: Float[Array, "n t row_width"] | None,
    *,
    geometry: Geometry,
    options: StepOptions,
    kv_heads: int,
    scale: float,
) -> tuple[Float[Array, "n t heads width"], LayerCache]:
    """Rolls ``rows`` into the ring and attends to each query's window; see ``attend_full``."""
    assert layer.window is not None
    assert rows is not None
    window, layout = layer.window.shape[1], window_layout(geometry)
    # Padding may be anything, and a masked key is still multiplied: 0 * NaN is NaN.
    clean = jnp.where(tokens.real[..., None], rows, jnp.zeros((), rows.dtype))
    roll = _roll_token if tokens.every_slot else _roll_tile
    buffer, ring = roll(tokens, layer.window, packing.encode(clean, layout))
    one = functools.partial(
        kernel.attend_window_pairs,
        window=window,
        kv_heads=kv_heads,
        scale=scale,
        implementation=options.kernels,
    )
    arguments = (q, packing.decode(buffer, layout), tokens.starts - tokens.known_from)
    o = map_sequences(one, arguments, tokens.active, sequential=options.sequential)
    return o, dataclasses.replace(layer, window=ring)


def _roll_tile(
    tokens: Tokens,
    rings: Shaped[Array, "slots window stored"],
    rows: Shaped[Array, "n t stored"],
) -> tuple[Shaped[Array, "n buffer stored"], Shaped[Array, "slots window stored"]]:
    """The linear buffer that attention reads, and the rings after the tile."""
    ring = rings[jnp.minimum(tokens.slots, rings.shape[0] - 1)]
    before = read_window(ring, tokens.starts, ring.shape[1] - 1, tokens.known_from)
    buffer = jnp.concatenate([before, rows], axis=1)
    after = ring_after(buffer, ring, tokens.starts, tokens.ends)
    return buffer, rings.at[tokens.slots].set(after, mode="drop")


def _roll_token(
    tokens: Tokens,
    rings: Shaped[Array, "slots window stored"],
    rows: Shaped[Array, "n 1 stored"],
) -> tuple[Shaped[Array, "n window stored"], Shaped[Array, "slots window stored"]]:
    """As ``_roll_tile`` for one token of every slot.

    Written before it is read: the other order makes XLA copy the ring.
    """
    place: Int[Array, " n"] = tokens.starts % rings.shape[1]
    rings = rings.at[tokens.slots, place].set(rows[:, 0], mode="drop")
    return read_window(rings, tokens.starts + 1, rings.shape[1]), rings

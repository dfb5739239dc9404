"""What a model's cache is made of, as data. Everything else is derived from it."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from fractions import Fraction

from hybridkv import formats
from hybridkv.arithmetic import round_up
from hybridkv.formats import RowFormat
from hybridkv.kinds import Kind

STATE_BYTES = 4
"""Compressor state is float32 in every release: bytes of one channel."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerGeometry:
    """What one layer keeps."""

    window: int = 0
    """Raw rows a query sees, itself included; 0 when the layer has no sliding window. Costs
    ``window`` rows a sequence, whatever its length."""
    ratio: int = 0
    """Tokens a stored row stands for; 1 for one row a token, 0 when the layer stores none."""
    overlap: bool = False
    """Whether a row also pools the tokens of the cell before its own."""
    indexed: bool = False
    """Whether attention over the rows is routed, so that every row has an index row beside it."""
    rows_of: int | None = None
    """The layer whose rows (and index rows) this layer reads instead of storing its own."""

    @property
    def stores_rows(self) -> bool:
        """Whether rows of this layer itself are in the pools."""
        return self.ratio > 0 and self.rows_of is None

    @property
    def stores_index(self) -> bool:
        """Whether index rows of this layer itself are in the pools."""
        return self.indexed and self.stores_rows

    @property
    def compresses(self) -> bool:
        """Whether this layer has an open cell: it makes rows that stand for several tokens."""
        return self.stores_rows and self.ratio > 1

    @property
    def state_halves(self) -> int:
        """Projections a token gives to the compressor: its own cell, and the next one's overlap."""
        return 2 if self.overlap else 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Geometry:
    """The true inputs of a cache; ratios and windows are values here and constants nowhere."""

    layers: tuple[LayerGeometry, ...]
    row_width: int
    """Channels of a window or compressed row."""
    rope_width: int = 0
    """Rotary channels, the last of a row; packed formats keep them wider."""
    index_width: int = 0
    """Channels of an index row."""
    window_format: RowFormat = formats.FLOAT32
    row_format: RowFormat = formats.FLOAT32
    index_format: RowFormat = formats.FLOAT32
    cells_per_block: int = 1
    """Cells of the coarsest ratio in one block. More means fewer, larger moves and longer minimum
    hits."""

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("a geometry needs at least one layer")
        for number, layer in enumerate(self.layers):
            self._check(number, layer)

    def _check(self, number: int, layer: LayerGeometry) -> None:
        if layer.window < 0 or layer.ratio < 0:
            raise ValueError(f"layer {number}: window and ratio must not be negative, got {layer}")
        if not layer.window and not layer.ratio:
            raise ValueError(f"layer {number} attends to nothing: give it a window or a ratio")
        if layer.indexed and not (layer.ratio and self.index_width):
            raise ValueError(f"layer {number} is indexed: set its ratio and index_width")
        if layer.overlap and layer.ratio < 2:
            raise ValueError(f"layer {number} overlaps, which needs a ratio of at least 2")
        if layer.rows_of is not None:
            if not 0 <= layer.rows_of < number:
                raise ValueError(f"layer {number} reads rows of {layer.rows_of}: not a layer below")
            owner = self.layers[layer.rows_of]
            if not owner.stores_rows or owner.ratio != layer.ratio:
                raise ValueError(
                    f"layer {number} (ratio {layer.ratio}) reads rows of layer {layer.rows_of}, "
                    f"which stores {'ratio ' + str(owner.ratio) if owner.stores_rows else 'none'}"
                )

    @functools.cached_property
    def ratios(self) -> tuple[int, ...]:
        """The ratio groups: every ratio at which some layer stores rows, ascending."""
        return tuple(sorted({layer.ratio for layer in self.layers if layer.stores_rows}))

    @functools.cached_property
    def block_tokens(self) -> int:
        """Tokens of one block: the lcm of the ratios times ``cells_per_block``."""
        return math.lcm(*self.ratios) * self.cells_per_block if self.ratios else 1

    def rows_per_block(self, ratio: int) -> int:
        """Rows that one layer of this ratio has in one block."""
        return self.block_tokens // ratio

    def owner(self, layer: int) -> int:
        """The layer that stores the rows that ``layer`` reads."""
        rows_of = self.layers[layer].rows_of
        return layer if rows_of is None else rows_of

    @functools.cached_property
    def window_row_bytes(self) -> int:
        """Bytes of one window row of one layer."""
        return self.window_format.row_bytes(self.row_width, self.rope_width)

    @functools.cached_property
    def row_bytes(self) -> int:
        """Bytes of one compressed row of one layer."""
        return self.row_format.row_bytes(self.row_width, self.rope_width)

    @functools.cached_property
    def index_row_bytes(self) -> int:
        """Bytes of one index row of one layer."""
        return self.index_format.row_bytes(self.index_width)

    @functools.cached_property
    def bytes_per_token(self) -> Mapping[Kind, Fraction]:
        """Bytes that one more token of context costs for ever, by kind (exact fractions)."""
        rows = sum(
            (Fraction(self.row_bytes, x.ratio) for x in self.layers if x.stores_rows), Fraction(0)
        )
        index = sum(
            (Fraction(self.index_row_bytes, x.ratio) for x in self.layers if x.stores_index),
            Fraction(0),
        )
        return {Kind.COMPRESSED: rows, Kind.INDEXER: index}

    @functools.cached_property
    def block_bytes(self) -> int:
        """Bytes of one block: compressed and index rows of every layer that stores them."""
        return int(sum(self.bytes_per_token.values()) * self.block_tokens)

    @functools.cached_property
    def sequence_bytes(self) -> Mapping[Kind, int]:
        """Bytes that a sequence holds whatever its length, by kind: what a snapshot copies."""
        window = sum(layer.window for layer in self.layers) * self.window_row_bytes
        tail = sum(self._tail_bytes(layer) for layer in self.layers)
        return {Kind.WINDOW: window, Kind.TAIL: tail}

    def _tail_bytes(self, layer: LayerGeometry) -> int:
        """An open cell and, with overlap, one half of the last complete one, (kv, gate) each."""
        if not layer.compresses:
            return 0
        width = self.row_width + (self.index_width if layer.indexed else 0)
        halves = layer.state_halves + (1 if layer.overlap else 0)
        return 2 * layer.ratio * halves * width * STATE_BYTES

    def cache_bytes(self, tokens: int) -> Mapping[Kind, int]:
        """Bytes that one sequence of ``tokens`` tokens occupies, by kind, in whole blocks."""
        whole = round_up(tokens, self.block_tokens)
        return {k: int(v * whole) for k, v in self.bytes_per_token.items()} | dict(
            self.sequence_bytes
        )

    def minimum_hit(self, tile_tokens: int) -> int:
        """The shortest prefix that can be reused: blocks must be whole and resume on a tile."""
        return math.lcm(self.block_tokens, tile_tokens)

    def replay_tokens(self, position: int) -> int:
        """Tokens before ``position`` to recompute so that windows, overlaps and tails are exact.

        Stored compressed rows are read, not made. A token of layer ``l`` is exact when every token
        its windows reach through is, so with ``depth`` windowed layers below, the first
        ``depth * (W - 1)`` recomputed tokens are spent on warming up; after them the layer must see
        what it has to rebuild: its own window, or its overlap and open cell (design, section 3).
        """
        reach, longest = 0, 0
        for layer in self.layers:
            longest = max(longest, reach + self._rebuilt_tokens(layer, position))
            reach += max(layer.window - 1, 0)
        return min(longest, position)

    def _rebuilt_tokens(self, layer: LayerGeometry, position: int) -> int:
        tail = 0
        if layer.compresses:
            tail = position % layer.ratio + (layer.ratio if layer.overlap else 0)
        return max(layer.window - 1, tail, 0)

    @functools.cached_property
    def longest_replay_tokens(self) -> int:
        """``replay_tokens`` at its worst position of an arbitrarily long prompt."""
        period = math.lcm(*self.ratios) if self.ratios else 1
        far = round_up(sum(x.window + 2 * x.ratio for x in self.layers), period)
        return max(self.replay_tokens(far + i) for i in range(period))

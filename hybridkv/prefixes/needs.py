"""What a resume position needs: the predicate reads it, what a writer keeps is derived from it."""

from hybridkv.arithmetic import round_down
from hybridkv.geometry import Geometry
from hybridkv.kinds import Kind


def block_kinds(geometry: Geometry) -> tuple[Kind, ...]:
    """Kinds that every block before the resume position must hold."""
    kinds = []
    if any(layer.stores_rows for layer in geometry.layers):
        kinds.append(Kind.COMPRESSED)
    if any(layer.stores_index for layer in geometry.layers):
        kinds.append(Kind.INDEXER)
    return tuple(kinds)


def snapshot_kinds(geometry: Geometry) -> tuple[Kind, ...]:
    """Kinds that a snapshot at the resume position must hold; none in a homogeneous model.

    At a tile boundary every open cell is empty, so that only overlaps are left of TAIL: layers
    whose ratio divides the tile but do not overlap need nothing.
    """
    kinds = []
    if any(layer.window for layer in geometry.layers):
        kinds.append(Kind.WINDOW)
    if any(layer.compresses and layer.overlap for layer in geometry.layers):
        kinds.append(Kind.TAIL)
    return tuple(kinds)


def replay_start(geometry: Geometry, position: int, tile: int) -> int:
    """First token of a replay that makes the state at ``position`` exact: a tile boundary."""
    return round_down(max(position - geometry.replay_tokens(position), 0), tile)

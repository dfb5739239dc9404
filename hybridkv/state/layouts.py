"""How the rows of a geometry are laid out in bytes, as the kernels take it."""

from hybridkv.geometry import Geometry
from pallas_kernels.packing.layout import RowLayout


def window_layout(geometry: Geometry) -> RowLayout:
    """Of window rows."""
    return RowLayout(geometry.window_format.name, geometry.row_width, geometry.rope_width)


def row_layout(geometry: Geometry) -> RowLayout:
    """Of compressed rows."""
    return RowLayout(geometry.row_format.name, geometry.row_width, geometry.rope_width)


def index_layout(geometry: Geometry) -> RowLayout:
    """Of index rows, whose rotary channels are coded like the others in every release."""
    return RowLayout(geometry.index_format.name, geometry.index_width)

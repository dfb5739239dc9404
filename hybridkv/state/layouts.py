"""How the rows of a geometry are laid out in bytes, as the kernels take it."""

from hybridkv.geometry import Geometry
from pallas_kernels.packing.layout import RowLayout, layout_named


def window_layout(geometry: Geometry) -> RowLayout:
    """Of window rows."""
    return layout_named(geometry.window_format.name, geometry.row_width, geometry.rope_width)


def row_layout(geometry: Geometry) -> RowLayout:
    """Of compressed rows."""
    return layout_named(geometry.row_format.name, geometry.row_width, geometry.rope_width)


def index_layout(geometry: Geometry) -> RowLayout:
    """Of index rows, whose rotary channels are coded like the others in every release."""
    return layout_named(geometry.index_format.name, geometry.index_width)

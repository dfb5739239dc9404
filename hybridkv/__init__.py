"""hybridkv: the decode state of hybrid-attention models, kept, moved and restored bit for bit."""

from hybridkv.engine.generate import GenerationStats, Generator, default_options
from hybridkv.engine.sampling import SamplingOptions
from hybridkv.engine.steps import DonatedCacheError, Steps, prompt_tiles
from hybridkv.errors import UserError
from hybridkv.formats import RowFormat
from hybridkv.geometry import Geometry, LayerGeometry
from hybridkv.kinds import Kind
from hybridkv.state.batch import DecodeBatch, StepOptions, TileBatch
from hybridkv.state.cache import Cache, assign_in_order, cache_bytes
from hybridkv.state.capacity import Capacity

__all__ = [
    "Cache",
    "Capacity",
    "DecodeBatch",
    "DonatedCacheError",
    "GenerationStats",
    "Generator",
    "Geometry",
    "Kind",
    "LayerGeometry",
    "RowFormat",
    "SamplingOptions",
    "StepOptions",
    "Steps",
    "TileBatch",
    "UserError",
    "assign_in_order",
    "cache_bytes",
    "default_options",
    "prompt_tiles",
]

"""hybridkv: the decode state of hybrid-attention models, kept, moved and restored bit for bit."""

from hybridkv.engine.generate import GenerationStats, Generator, default_options
from hybridkv.engine.runner import Runner, RunnerOptions
from hybridkv.engine.sampling import SamplingOptions
from hybridkv.engine.steps import DonatedCacheError, Steps, prompt_tiles
from hybridkv.errors import UserError
from hybridkv.formats import RowFormat
from hybridkv.geometry import Geometry, LayerGeometry
from hybridkv.kinds import Kind
from hybridkv.prefixes.plan import Miss, Plan
from hybridkv.prefixes.policy import SnapshotPolicy
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
    "Miss",
    "Plan",
    "RowFormat",
    "Runner",
    "RunnerOptions",
    "SamplingOptions",
    "SnapshotPolicy",
    "StepOptions",
    "Steps",
    "TileBatch",
    "UserError",
    "assign_in_order",
    "cache_bytes",
    "default_options",
    "prompt_tiles",
]

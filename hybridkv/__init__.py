"""hybridkv: the decode state of hybrid-attention models, kept, moved and restored bit for bit."""

from hybridkv.engine.engine import Engine, EngineOptions
from hybridkv.engine.functional import FunctionModel
from hybridkv.engine.generate import Generator, default_options
from hybridkv.engine.requests import Output, Request
from hybridkv.engine.runner import Runner, RunnerOptions
from hybridkv.engine.sampling import SamplingOptions
from hybridkv.engine.saving import SavedPrefix, load_prefix, save_prefix
from hybridkv.errors import UserError
from hybridkv.geometry import Geometry, LayerGeometry
from hybridkv.kinds import Kind
from hybridkv.prefixes.plan import Miss, Plan
from hybridkv.prefixes.policy import SnapshotPolicy
from hybridkv.state.batch import DecodeBatch, StepOptions, TileBatch
from hybridkv.state.cache import Cache
from hybridkv.state.capacity import Capacity

__all__ = [
    "Cache",
    "Capacity",
    "DecodeBatch",
    "Engine",
    "EngineOptions",
    "FunctionModel",
    "Generator",
    "Geometry",
    "Kind",
    "LayerGeometry",
    "Miss",
    "Output",
    "Plan",
    "Request",
    "Runner",
    "RunnerOptions",
    "SamplingOptions",
    "SavedPrefix",
    "SnapshotPolicy",
    "StepOptions",
    "TileBatch",
    "UserError",
    "default_options",
    "load_prefix",
    "save_prefix",
]

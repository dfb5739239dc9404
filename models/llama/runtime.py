"""The model as the engine takes it: parameters and two pure functions."""

from typing import Any

import jax
from flax import nnx

from hybridkv import formats
from hybridkv.formats import RowFormat
from hybridkv.geometry import Geometry
from hybridkv.state.batch import DecodeBatch, StepOptions, TileBatch
from hybridkv.state.cache import Cache
from models.common import matmul_precision
from models.llama import steps
from models.llama.model import Llama


class LlamaRuntime:
    """Splits the module once; each step merges it again inside ``jax.jit``."""

    def __init__(
        self, model: Llama, *, format: RowFormat | None = None, cells_per_block: int = 16
    ) -> None:
        if format is None:
            format = formats.BFLOAT16 if model.config.dtype == "bfloat16" else formats.FLOAT32
        self.config = model.config
        self.geometry: Geometry = model.config.geometry(
            row_format=format, cells_per_block=cells_per_block
        )
        self.vocab_size = model.config.vocab_size
        self.pad_token = model.config.pad_token
        self._graph, state = nnx.split(model)
        # A flat list: flattening the module's state anew costs milliseconds a call.
        self.params, self._structure = jax.tree.flatten(state)

    def tile_step(
        self, params: Any, batch: TileBatch, cache: Cache, options: StepOptions
    ) -> tuple[jax.Array, Cache]:
        """See ``models.llama.steps.tile_step``."""
        with matmul_precision(self.config.dtype):
            return steps.tile_step(self._merge(params), batch, cache, options)

    def decode_step(
        self, params: Any, batch: DecodeBatch, cache: Cache, options: StepOptions
    ) -> tuple[jax.Array, Cache]:
        """See ``models.llama.steps.decode_step``."""
        with matmul_precision(self.config.dtype):
            return steps.decode_step(self._merge(params), batch, cache, options)

    def _merge(self, params: list[jax.Array]) -> Llama:
        return nnx.merge(self._graph, jax.tree.unflatten(self._structure, params))

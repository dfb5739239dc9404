"""A model as the engine takes it: parameters and two pure functions."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from hybridkv.geometry import Geometry
from hybridkv.state.batch import DecodeBatch, StepOptions, TileBatch
from hybridkv.state.cache import Cache
from models.common import matmul_precision

Step = Callable[[Any, Any, Cache, StepOptions], tuple[jax.Array, Cache]]
"""(module, batch, cache, options) to logits and the cache after them."""


class ModuleRuntime:
    """Splits an NNX module once; each step merges it again inside ``jax.jit``."""

    def __init__(self, model: Any, geometry: Geometry, *, tile: Step, decode: Step) -> None:
        self.config = model.config
        self.geometry = geometry
        self.vocab_size: int = model.config.vocab_size
        self.pad_token: int | None = model.config.pad_token
        self._tile, self._decode = tile, decode
        self._graph, state = nnx.split(model)
        # A flat list: flattening the module's state anew costs milliseconds a call.
        self.params, self._structure = jax.tree.flatten(state)

    def tile_step(
        self, params: Any, batch: TileBatch, cache: Cache, options: StepOptions
    ) -> tuple[jax.Array, Cache]:
        """Consumes prompt tokens; see ``StepModel.tile_step``."""
        with matmul_precision(self.config.dtype):
            return self._tile(self._merge(params), batch, cache, options)

    def decode_step(
        self, params: Any, batch: DecodeBatch, cache: Cache, options: StepOptions
    ) -> tuple[jax.Array, Cache]:
        """Consumes one token a slot; see ``StepModel.decode_step``."""
        with matmul_precision(self.config.dtype):
            return self._decode(self._merge(params), batch, cache, options)

    @property
    def module(self) -> Any:
        """The model, of the same arrays."""
        return self._merge(self.params)

    def _merge(self, params: list[jax.Array]) -> Any:
        return nnx.merge(self._graph, jax.tree.unflatten(self._structure, params))

"""The tile step and the decode step with abstract parameters and cache, ready to be compiled."""

import dataclasses
from collections.abc import Callable
from typing import Any

import aot_models
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from hybridkv.engine.steps import idle_decode, idle_tile
from hybridkv.errors import UserError
from hybridkv.state import leaf
from hybridkv.state.batch import StepOptions
from hybridkv.state.cache import Cache
from hybridkv.state.capacity import Capacity
from models.deepseek_v4 import sharding
from models.deepseek_v4.cache_formats import CACHE_FORMATS, CacheFormats
from models.deepseek_v4.decode import decode_step
from models.deepseek_v4.model import DeepseekV4
from models.deepseek_v4.tile import tile_step
from models.runtime import ModuleRuntime


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepCase:
    """What a user asks about: will this model, batch and context compile and fit?"""

    step: str
    """``tile`` or ``decode``."""
    model: str = "v4-flash"
    layers: int | None = None
    slots: int = 8
    context: int = 65536
    """Tokens of each slot's sequence."""
    tile: int = 128
    lanes: int = 1
    cells_per_block: int = 1
    dtype: str | None = None
    cache_format: str | None = None
    data: int = 1
    """Devices that the slots are spread over; the others share each matrix."""
    spread_weights: bool = False
    """Split matrices over all devices, also over those that the slots are spread over."""
    kernels: str | None = None
    """Implementation of the kernels: the target's by default, or else the reference."""

    @property
    def name(self) -> str:
        """For tables."""
        layers = "" if self.layers is None else f", {self.layers} layers"
        batch = (
            f"{self.slots} slots of {self.context}"
            if self.step == "decode"
            else (f"{self.lanes} x {self.tile} tokens, {self.slots} slots of {self.context}")
        )
        rows = "" if self.cache_format is None else f", rows in {self.cache_format}"
        return f"{self.step} {self.model}{layers}: {batch}{rows}"


@dataclasses.dataclass(frozen=True)
class AbstractStep:
    """A step to be traced, and the sizes that say what fits."""

    function: Callable[..., Any]
    arguments: tuple[Any, Any, Cache]
    out_shardings: Any
    mesh: jax.sharding.Mesh
    capacity: Capacity
    block_tokens: int
    parameters: int

    @property
    def pools(self) -> Any:
        """Arrays that grow with the tokens in the cache."""
        cache = self.arguments[2]
        return cache.compressed, cache.indexer

    @property
    def tokens(self) -> int:
        """That the pools hold."""
        return self.capacity.blocks * self.block_tokens


def mesh_of(devices: list[Any], data: int) -> jax.sharding.Mesh:
    """A mesh of axes ``data`` and ``model``.

    Raises:
      UserError: ``data`` does not divide the number of devices.
    """
    if data < 1 or len(devices) % data:
        raise UserError(f"--data {data} does not divide {len(devices)} devices")
    return jax.sharding.Mesh(np.array(devices).reshape(data, -1), ("data", "model"))


def abstract_step(case: StepCase, devices: list[Any], *, blocks: int | None = None) -> AbstractStep:
    """The step of ``case`` for ``devices``.

    Args:
      case: what is compiled.
      devices: one, or all of a slice.
      blocks: of the pools, instead of enough for every slot's context.

    Raises:
      UserError: the case does not fit the model.
    """
    config = aot_models.model_config(case.model, layers=case.layers, dtype=case.dtype)
    chosen = _formats(case.cache_format or config.dtype)
    geometry = config.geometry(
        window_format=chosen.window,
        row_format=chosen.rows,
        index_format=chosen.index,
        cells_per_block=case.cells_per_block,
    )
    if case.tile % geometry.block_tokens:
        raise UserError(f"--tile {case.tile} is no multiple of the block, {geometry.block_tokens}")
    mesh = mesh_of(devices, case.data)
    model = nnx.eval_shape(lambda: DeepseekV4(config, nnx.Rngs(0)))
    runtime = ModuleRuntime(model, geometry, tile=tile_step, decode=decode_step)
    capacity = Capacity.for_tokens(geometry, tokens=case.context, slots=case.slots)
    if blocks is not None:
        capacity = dataclasses.replace(capacity, blocks=blocks)
    declared = Cache.declare(geometry, capacity)
    cache_shardings = leaf.shardings(declared, mesh)
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    rules = sharding.SPREAD_RULES if case.spread_weights else sharding.DEFAULT_RULES
    options = StepOptions(tile=case.tile, lanes=case.lanes, kernels=case.kernels)
    step: Callable[..., Any]
    batch: Callable[[], Any]
    if case.step == "tile":
        step, batch = runtime.tile_step, lambda: idle_tile(options, case.slots)
    else:
        step, batch = runtime.decode_step, lambda: idle_decode(case.slots)
    arguments = (
        _placed(runtime.params, jax.tree.leaves(sharding.shardings(model, mesh, rules))),
        jax.tree.map(lambda x: _struct(x, whole), jax.eval_shape(batch)),
        jax.tree.map(_struct, leaf.abstract(declared), cache_shardings),
    )
    return AbstractStep(
        function=lambda params, batch, cache: step(params, batch, cache, options),
        arguments=arguments,
        out_shardings=(whole, cache_shardings),
        mesh=mesh,
        capacity=capacity,
        block_tokens=geometry.block_tokens,
        parameters=sum(x.size for x in runtime.params),
    )


def _formats(name: str) -> CacheFormats:
    if name not in CACHE_FORMATS:
        raise UserError(f"unknown cache format {name!r}: known are {', '.join(CACHE_FORMATS)}")
    return CACHE_FORMATS[name]


def _struct(x: Any, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _placed(arrays: list[Any], shardings: list[Any]) -> list[jax.ShapeDtypeStruct]:
    return [_struct(x, sharding) for x, sharding in zip(arrays, shardings, strict=True)]


def only_read(tree: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A program that takes all of ``tree``: its memory is what the arrays occupy as laid out."""
    leaves = tuple(jax.tree.leaves(tree))

    def function(*arrays: jax.Array) -> jax.Array:
        return jnp.zeros(())

    return function, leaves

"""What fixes the bits of a tile step, as an id: stored rows may be read only where it is equal."""

import dataclasses
import hashlib
import importlib.metadata
from typing import Any

import jax

from hybridkv.engine.protocol import StepModel
from hybridkv.engine.steps import Steps, idle_tile
from hybridkv.prefixes.identity import Identity, weights_digest
from hybridkv.state.batch import StepOptions, TileBatch
from hybridkv.state.cache import Cache
from hybridkv.state.capacity import Capacity
from pallas_kernels import implementations

REFERENCE_TILES = 2
LIBRARIES = ("jax", "jaxlib", "flax", "numpy")


def identify(model: StepModel, options: StepOptions, capacity: Capacity | None = None) -> Identity:
    """The identity of everything this model stores under these options; see ``numerics_id``."""
    return Identity.of_geometry(
        model.geometry,
        weights=weights_digest(model.params),
        numerics=numerics_id(model, options, capacity),
    )


def numerics_id(model: StepModel, options: StepOptions, capacity: Capacity | None = None) -> str:
    """Hex digest of the tile step's lowered text, its kernels, the device kind, libraries, flags.

    The text is that of a small cache of fixed size, so that engines of any capacity agree: no
    contraction has the capacity as its shape. Only which implementation of a kernel supports the
    input may depend on it: those that are chosen at ``capacity`` (None: at that small one) count
    beside the text. Logits of all positions are an addition behind the layers and do not count.
    """
    tokens = REFERENCE_TILES * options.tile
    small = Capacity.for_tokens(model.geometry, tokens=tokens, slots=options.lanes)
    options = dataclasses.replace(options, all_logits=False)
    steps = Steps(model, options)
    cache = Cache.abstract(model.geometry, small)
    text = steps.lower_tile(idle_tile(options, small.slots), cache)
    chosen = _chosen(model, options, capacity or small)
    versions = [f"{name} {importlib.metadata.version(name)}" for name in LIBRARIES]
    device = jax.devices()[0]
    flags = [
        f"{name}={getattr(jax.config, name)}"
        for name in ("jax_default_matmul_precision", "jax_enable_x64", "jax_numpy_dtype_promotion")
    ]
    parts = [text, *chosen, repr(options), device.platform, device.device_kind, *versions, *flags]
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _chosen(model: StepModel, options: StepOptions, capacity: Capacity) -> list[str]:
    """Which implementations a tile step of this capacity takes, where that is not fixed."""
    if not implementations.may_choose(options.kernels):
        return []

    def step(params: Any, batch: TileBatch, cache: Cache) -> Any:
        return model.tile_step(params, batch, cache, options)

    batch, cache = idle_tile(options, capacity.slots), Cache.abstract(model.geometry, capacity)
    with implementations.listening() as chosen:
        jax.eval_shape(step, model.params, batch, cache)
    return chosen

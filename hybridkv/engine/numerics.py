"""What fixes the bits of a tile step, as an id: stored rows may be read only where it is equal."""

import dataclasses
import hashlib
import importlib.metadata

import jax

from hybridkv.engine.protocol import StepModel
from hybridkv.engine.steps import Steps, idle_tile
from hybridkv.prefixes.identity import Identity, weights_digest
from hybridkv.state.batch import StepOptions
from hybridkv.state.cache import Cache
from hybridkv.state.capacity import Capacity

REFERENCE_TILES = 2
LIBRARIES = ("jax", "jaxlib", "flax", "numpy")


def identify(model: StepModel, options: StepOptions) -> Identity:
    """The identity of everything this model stores under these options."""
    return Identity.of_geometry(
        model.geometry,
        weights=weights_digest(model.params),
        numerics=numerics_id(model, options),
    )


def numerics_id(model: StepModel, options: StepOptions) -> str:
    """Hex digest of the tile step's lowered text, the device kind, libraries and flags.

    The text is that of a small cache of fixed size, so that engines of any capacity agree: no
    contraction has the capacity as its shape. Logits of all positions are an addition behind the
    layers and do not count.
    """
    tokens = REFERENCE_TILES * options.tile
    capacity = Capacity.for_tokens(model.geometry, tokens=tokens, slots=options.lanes)
    options = dataclasses.replace(options, all_logits=False)
    steps = Steps(model, options)
    cache = Cache.abstract(model.geometry, capacity)
    text = steps.lower_tile(idle_tile(options, capacity.slots), cache)
    versions = [f"{name} {importlib.metadata.version(name)}" for name in LIBRARIES]
    device = jax.devices()[0]
    flags = [
        f"{name}={getattr(jax.config, name)}"
        for name in ("jax_default_matmul_precision", "jax_enable_x64", "jax_numpy_dtype_promotion")
    ]
    parts = [text, repr(options), device.platform, device.device_kind, *versions, *flags]
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()

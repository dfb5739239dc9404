"""A toy Llama, small enough to verify a device in seconds."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.files import parameter_at
from models.llama.config import LlamaConfig
from models.llama.model import Llama
from models.llama.weights import places

TOY_LLAMA = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=6,
    mlp_size=40,
    norm_eps=1e-5,
    rope_theta=100.0,
)
TIED = dataclasses.replace(TOY_LLAMA, tied_embeddings=True, kv_heads=1)


def toy_llama(config: LlamaConfig = TOY_LLAMA) -> Llama:
    """A random model in which no parameter has its neutral initial value."""
    model = nnx.eval_shape(lambda: Llama(config, nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    for place in places(config):
        parameter = parameter_at(model, place.path)
        noise = rng.normal(size=parameter.shape)
        matrix = len(parameter.shape) == 2 and place.path != ("embed",)
        value = noise * parameter.shape[-1] ** -0.5 if matrix else 1 + 0.3 * noise
        parameter.set_value(jnp.asarray(value.astype(np.float32)).astype(parameter.dtype))
    return model

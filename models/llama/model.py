"""The whole model, readable top to bottom.

As in ``models/deepseek_v4/model.py``, how attention finds its keys is the ``attend`` argument: a
function from (layer number, attention module, normalised input, carry) to (output, carry).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from models.common import Angles, Linear, RMSNorm, rotary_angles
from models.llama.attention import Attention
from models.llama.config import LlamaConfig


class AttendInput(NamedTuple):
    """What ``attend`` gets beside the layer's carry."""

    attention: Attention
    x: jax.Array
    """``[*n, hidden]``, normalised."""
    angles: Angles
    """The rotation at each token's position."""


Attend = Callable[[AttendInput, Any], tuple[jax.Array, Any]]


class MLP(nnx.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs) -> None:
        hidden, size, dtype = config.hidden_size, config.mlp_size, config.dtype
        self.gate = Linear(hidden, size, dtype=dtype, rngs=rngs)
        self.up = Linear(hidden, size, dtype=dtype, rngs=rngs)
        self.down = Linear(size, hidden, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "*n hidden"]) -> Float[Array, "*n hidden"]:
        """``down(silu(gate(x)) * up(x))``."""
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    """Attention and MLP, each normalised before and added after."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs) -> None:
        self.attention_norm = RMSNorm(config.hidden_size, eps=config.norm_eps, dtype=config.dtype)
        self.attention = Attention(config, rngs)
        self.mlp_norm = RMSNorm(config.hidden_size, eps=config.norm_eps, dtype=config.dtype)
        self.mlp = MLP(config, rngs)

    def __call__(
        self, x: Float[Array, "*n hidden"], angles: Angles, attend: Attend, carry: Any
    ) -> tuple[Float[Array, "*n hidden"], Any]:
        """The residual stream after this block, and what ``attend`` carries on."""
        y, carry = attend(AttendInput(self.attention, self.attention_norm(x), angles), carry)
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), carry


class Llama(nnx.Module):
    """Llama decoder (arXiv 2302.13971; Hugging Face ``LlamaForCausalLM``)."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs) -> None:
        embed = nnx.initializers.normal(stddev=1.0)
        shape = (config.vocab_size, config.hidden_size)
        self.embed = nnx.Param(embed(rngs.params(), shape, jnp.dtype(config.dtype)))
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.layers)])
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_eps, dtype=config.dtype)
        self.head = nnx.data(
            None
            if config.tied_embeddings
            else Linear(config.hidden_size, config.vocab_size, dtype=config.dtype, rngs=rngs)
        )
        self.config = config

    def __call__(
        self,
        tokens: Int[Array, "*n"],
        positions: Int[Array, "*n"],
        attend: Attend,
        carries: Sequence[Any],
    ) -> tuple[Float[Array, "*n hidden"], tuple[Any, ...]]:
        """Final hidden states (normalised) and each layer's carry."""
        angles = rotary_angles(positions, self.config.frequencies())
        x = self.embed[...][tokens]
        after = []
        for block, carry in zip(self.blocks, carries, strict=True):
            x, carry = block(x, angles, attend, carry)
            after.append(carry)
        return self.norm(x), tuple(after)

    def logits(self, hidden: Float[Array, "*n hidden"]) -> Float[Array, "*n vocab"]:
        """float32 logits of final hidden states."""
        logits = hidden @ self.embed[...].T if self.head is None else self.head(hidden)
        return logits.astype(jnp.float32)

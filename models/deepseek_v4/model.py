"""The whole model, readable top to bottom.

A token passes embedding, blocks and head in every use of the model; what differs between a prompt
tile, a decode step and training is only how attention finds its keys. That is the ``attend``
argument: a function from (layer number, attention module, normalised input, carry) to (output,
carry). See ``tile.py``, ``decode.py`` and ``parallel.py``.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from models.common import Angles, Linear, RMSNorm, rotary_angles
from models.deepseek_v4.attention import Attention
from models.deepseek_v4.config import DeepseekV4Config
from models.deepseek_v4.experts import Experts
from models.deepseek_v4.hyper_connections import HyperConnection, StreamHead


class AttendInput(NamedTuple):
    """What ``attend`` gets beside the layer's carry."""

    attention: Attention
    x: jax.Array
    """``[*n, hidden]``, normalised."""
    positions: jax.Array
    """int32 ``[*n]``."""
    angles: Angles
    """The layer's rotation at ``positions``."""


Attend = Callable[[AttendInput, Any], tuple[jax.Array, Any]]


class Block(nnx.Module):
    """Attention and experts, each inside its hyper-connection."""

    def __init__(self, config: DeepseekV4Config, layer: int, rngs: nnx.Rngs) -> None:
        def norm() -> RMSNorm:
            return RMSNorm(config.hidden_size, eps=config.norm_eps, dtype=config.dtype)

        self.attention_hc = HyperConnection(config, rngs)
        self.attention_norm = norm()
        self.attention = Attention(config, layer, rngs)
        self.experts_hc = HyperConnection(config, rngs)
        self.experts_norm = norm()
        self.experts = Experts(config, layer, rngs)

    def __call__(
        self,
        streams: Float[Array, "*n streams hidden"],
        tokens: Int[Array, "*n"],
        positions: Int[Array, "*n"],
        angles: Angles,
        attend: Attend,
        carry: Any,
        expert_options: dict[str, Any],
    ) -> tuple[Float[Array, "*n streams hidden"], Any]:
        """The streams after this block, and what ``attend`` carries on."""
        x, mix = self.attention_hc(streams)
        inputs = AttendInput(self.attention, self.attention_norm(x), positions, angles)
        y, carry = attend(inputs, carry)
        streams = self.attention_hc.leave(streams, y, mix)
        x, mix = self.experts_hc(streams)
        y = self.experts(self.experts_norm(x), tokens, **expert_options)
        return self.experts_hc.leave(streams, y, mix), carry


class DeepseekV4(nnx.Module):
    """DeepSeek-V4 decoder (paper: arXiv 2606.19348; release ``inference/model.py``)."""

    def __init__(self, config: DeepseekV4Config, rngs: nnx.Rngs) -> None:
        embed = nnx.initializers.normal(stddev=1.0)
        shape = (config.vocab_size, config.hidden_size)
        self.embed = nnx.Param(embed(rngs.params(), shape, jnp.dtype(config.dtype)))
        self.blocks = nnx.List([Block(config, layer, rngs) for layer in range(config.layers)])
        self.stream_head = StreamHead(config, rngs)
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_eps, dtype=config.dtype)
        # The release keeps the head in float32 whatever the model's dtype.
        self.head = Linear(config.hidden_size, config.vocab_size, dtype="float32", rngs=rngs)
        self.config = config

    def __call__(
        self,
        tokens: Int[Array, "*n"],
        positions: Int[Array, "*n"],
        attend: Attend,
        carries: Sequence[Any],
        **expert_options: Any,
    ) -> tuple[Float[Array, "*n hidden"], tuple[Any, ...]]:
        """Final hidden states (normalised) and each layer's carry."""
        config = self.config
        angles = {
            rope: rotary_angles(positions, rope.frequencies(config.rope_dim))
            for rope in {config.rope, config.compressed_rope}
        }
        embedded = self.embed[...][tokens]
        streams = jnp.repeat(embedded[..., None, :], config.streams, axis=-2)
        after = []
        for layer, (block, carry) in enumerate(zip(self.blocks, carries, strict=True)):
            turn = angles[config.layer_rope(layer)]
            streams, carry = block(streams, tokens, positions, turn, attend, carry, expert_options)
            after.append(carry)
        return self.norm(self.stream_head(streams)), tuple(after)

    def logits(self, hidden: Float[Array, "*n hidden"]) -> Float[Array, "*n vocab"]:
        """float32 logits of final hidden states."""
        return self.head(hidden)

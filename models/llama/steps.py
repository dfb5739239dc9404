"""The tile step and the decode step: pure functions over the cache.

Both write their tokens' rows to the blocks first and read every key back through the block table,
so a row is attended as it was stored by whoever made it.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hybridkv.state.attend import attend_full
from hybridkv.state.batch import DecodeBatch, StepOptions, TileBatch
from hybridkv.state.cache import Cache, LayerCache
from hybridkv.state.lanes import lanes_in_turn
from hybridkv.state.tokens import Tokens
from models.llama.model import AttendInput, Llama


def tile_step(
    model: Llama, batch: TileBatch, cache: Cache, options: StepOptions
) -> tuple[Float[Array, "lanes vocab"], Cache]:
    """Consumes each lane's tokens ``starts ... ends - 1``; DONATES cache when jitted by a caller.

    Returns float32 logits of each lane's last token (``[lanes, tile, vocab]`` of all tokens with
    ``options.all_logits``), and the cache at ``ends``. Idle lanes give zeros or garbage. Rows of
    tokens before ``write_from`` are read but not written; ``known_from`` has no meaning without a
    window.
    """

    def step(batch: TileBatch, cache: Cache) -> tuple[jax.Array, Cache]:
        tokens = Tokens.of_tile(batch, cache)
        hidden, after = _forward(model, tokens, cache, options)
        return model.logits(hidden if options.all_logits else tokens.last(hidden)), after

    if options.sequential and options.lanes > 1:
        return lanes_in_turn(step, batch, cache)
    return step(batch, cache)


def decode_step(
    model: Llama, batch: DecodeBatch, cache: Cache, options: StepOptions
) -> tuple[Float[Array, "slots vocab"], Cache]:
    """Consumes one token of every active slot; DONATES cache when jitted by a caller.

    Returns float32 logits (garbage for idle slots) and the cache one token later.
    """
    hidden, cache = _forward(model, Tokens.of_decode(batch, cache), cache, options)
    return model.logits(hidden[:, 0]), cache


def _forward(
    model: Llama, tokens: Tokens, cache: Cache, options: StepOptions
) -> tuple[Float[Array, "n t hidden"], Cache]:
    def attend(inputs: AttendInput, layer: LayerCache) -> tuple[jax.Array, LayerCache]:
        attention, x, angles = inputs
        o, layer = attend_full(
            tokens,
            layer,
            attention.queries(x, angles).astype(jnp.float32),
            attention.rows(x, angles),
            geometry=cache.geometry,
            options=options,
            kv_heads=attention.kv_heads,
            scale=attention.scale,
        )
        return attention.output(o.astype(x.dtype)), layer

    layers = [cache.layer(number) for number in range(model.config.layers)]
    hidden, after = model(tokens.tokens, tokens.positions, attend, layers)
    return hidden, cache.with_layers(after, tokens.lengths(cache.lengths))

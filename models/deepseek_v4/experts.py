"""Mixture of experts, dropless: no result depends on which other tokens are there.

Source: paper section 2.1, release ``model.py`` (``Gate``, ``Expert``, ``MoE``).
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from hybridkv.arithmetic import cdiv
from models.common import Linear, everywhere, gathered
from models.deepseek_v4.config import DeepseekV4Config


class Gate(nnx.Module):
    """Picks experts: by score with a balancing bias, or by token id in the hash layers."""

    def __init__(self, config: DeepseekV4Config, layer: int, rngs: nnx.Rngs) -> None:
        self.hashed = config.hash_layers[layer]
        self.score = Linear(config.hidden_size, config.experts, dtype="float32", rngs=rngs)
        self.bias = nnx.data(
            None if self.hashed else nnx.Param(jnp.zeros((config.experts,), jnp.float32))
        )
        self.expert_of = nnx.data(
            nnx.Variable(_spread(config.vocab_size, config.experts_per_token, config.experts))
            if self.hashed
            else None
        )
        self.per_token = config.experts_per_token
        self.scale = config.route_scale
        self.normalize = config.normalize_route

    def __call__(
        self, x: Float[Array, "n hidden"], tokens: Int[Array, " n"]
    ) -> tuple[Int[Array, "n k"], Float[Array, "n k"]]:
        """Experts of each token and their float32 weights, which come from unbiased scores."""
        scores = jnp.sqrt(jax.nn.softplus(self.score(x)))
        if self.expert_of is not None:
            picks = self.expert_of[...][tokens]
        else:
            assert self.bias is not None
            picks = jax.lax.top_k(scores + self.bias[...][None, :], self.per_token)[1]
        weights = jnp.take_along_axis(scores, picks, axis=-1)
        if self.normalize:
            weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
        return picks, weights * self.scale


def _spread(vocab: int, per_token: int, experts: int) -> jax.Array:
    """Token ids to experts for a fresh model: consecutive ids go round the experts."""
    first = jnp.arange(vocab, dtype=jnp.int32)[:, None] * per_token
    return (first + jnp.arange(per_token, dtype=jnp.int32)[None, :]) % experts


class Experts(nnx.Module):
    """Routed experts and the shared one."""

    def __init__(self, config: DeepseekV4Config, layer: int, rngs: nnx.Rngs) -> None:
        d, f, dtype = config.hidden_size, config.expert_dim, config.dtype
        up = nnx.initializers.truncated_normal(stddev=d**-0.5)
        down = nnx.initializers.truncated_normal(stddev=f**-0.5)
        self.gate = Gate(config, layer, rngs)
        self.up = nnx.Param(up(rngs.params(), (config.experts, 2 * f, d), jnp.dtype(dtype)))
        self.down = nnx.Param(down(rngs.params(), (config.experts, d, f), jnp.dtype(dtype)))
        shared = f * config.shared_experts
        self.shared_up = Linear(d, 2 * shared, dtype=dtype, rngs=rngs)
        self.shared_down = Linear(shared, d, dtype=dtype, rngs=rngs)
        self.limit = config.swiglu_limit

    def __call__(
        self,
        x: Float[Array, "*n hidden"],
        tokens: Int[Array, "*n"],
        *,
        rows: int,
        active: Bool[Array, "*n"] | None = None,
        differentiable: bool = False,
        dense: bool = False,
        loads: list[jax.Array] | None = None,
    ) -> Float[Array, "*n hidden"]:
        """The weighted sum over each token's experts, in pick order, plus the shared expert.

        ``rows`` tokens of one expert are multiplied at a time (a static choice: more rows use the
        weights better, fewer waste less on an expert's last, partly filled group). Tokens that are
        not ``active`` cost no routed expert and get none; without it all are. ``dense``
        multiplies every token by every expert instead, for training with few experts. ``loads``
        collects, layer by layer, each expert's share of the picks: float32 ``[experts]``.
        """
        flat, ids = x.reshape(-1, x.shape[-1]), tokens.reshape(-1)
        picks, weights = self.gate(flat, ids)
        if loads is not None:
            hot = picks[..., None] == jnp.arange(self.up.shape[0], dtype=picks.dtype)[None, None]
            loads.append(jnp.mean(hot.astype(jnp.float32), axis=(0, 1)))
        if dense:
            total = self._dense(flat, picks, weights)
        else:
            alive = None if active is None else active.reshape(-1)
            routed = self._routed(flat, picks, rows, alive, differentiable)
            total = jnp.zeros(flat.shape, jnp.float32)
            for k in range(picks.shape[1]):
                total = total + weights[:, k, None] * routed[:, k]
        shared = self.shared_down(clipped_swiglu(self.shared_up(flat), self.limit))
        return (total + shared.astype(jnp.float32)).astype(x.dtype).reshape(x.shape)

    def _dense(
        self, x: Float[Array, "n hidden"], picks: Int[Array, "n k"], weights: Float[Array, "n k"]
    ) -> Float[Array, "n hidden"]:
        """The routed sum as two plain products: experts that are not picked weigh nothing."""
        up, down = self.up[...], self.down[...]
        total = jnp.zeros(x.shape, jnp.float32)
        for expert in range(up.shape[0]):
            share = jnp.sum(jnp.where(picks == expert, weights, 0.0), axis=1)
            hidden = clipped_swiglu(gathered(x.astype(up.dtype) @ up[expert].T), self.limit)
            hidden = (hidden.astype(jnp.float32) * share[:, None]).astype(up.dtype)
            total = total + (hidden @ down[expert].T).astype(jnp.float32)
        return gathered(total)

    def _routed(
        self,
        x: Float[Array, "n hidden"],
        picks: Int[Array, "n k"],
        rows: int,
        active: Bool[Array, " n"] | None,
        static: bool,
    ) -> Float[Array, "n k hidden"]:
        """Each picked expert's output, float32, by groups of ``rows`` tokens of one expert."""
        up, down = self.up[...], self.down[...]
        experts, x, picks = up.shape[0], everywhere(x), everywhere(picks)
        pairs = None if active is None else jnp.repeat(active, picks.shape[1])
        order, group_expert, source, used = group_rows(picks.reshape(-1), experts, rows, pairs)

        def group(i: jax.Array) -> jax.Array:
            tokens = jax.lax.dynamic_slice(source, (i * rows,), (rows,)) // picks.shape[1]
            inputs = x[jnp.minimum(tokens, x.shape[0] - 1)].astype(up.dtype)
            hidden = clipped_swiglu(gathered(inputs @ up[group_expert[i]].T), self.limit)
            return (hidden @ down[group_expert[i]].T).astype(jnp.float32)

        groups = group_expert.shape[0]
        if static:
            out = jax.lax.map(group, jnp.arange(groups)).reshape(groups * rows, -1)
        else:

            def body(i: jax.Array, out: jax.Array) -> jax.Array:
                return jax.lax.dynamic_update_slice(out, group(i), (i * rows, 0))

            empty = jnp.zeros((groups * rows, x.shape[1]), jnp.float32)
            out = jax.lax.fori_loop(0, used, body, empty)
        out = gathered(out)[order].reshape(*picks.shape, -1)
        return out if active is None else jnp.where(active[:, None, None], out, 0.0)


def group_rows(
    expert: Int[Array, " pairs"],
    experts: int,
    rows: int,
    active: Bool[Array, " pairs"] | None = None,
) -> tuple[Int[Array, " pairs"], Int[Array, " groups"], Int[Array, " places"], Int[Array, ""]]:
    """Sorts (token, pick) pairs by expert into groups of ``rows`` places; idle ones get none.

    Returns the place of each pair, the expert of each group, the pair at each place (out of range
    where a place is empty), and how many groups are used.
    """
    pairs = expert.shape[0]
    if rows == 1:  # every pair is a group of its own: nothing to sort
        own = jnp.arange(pairs, dtype=jnp.int32)
        if active is None:
            return own, expert, own, jnp.int32(pairs)
        first = jnp.argsort(jnp.logical_not(active), stable=True).astype(jnp.int32)
        place = jnp.zeros_like(own).at[first].set(own)
        return place, expert[first], first, jnp.sum(active.astype(jnp.int32))
    groups = cdiv(pairs, rows) + min(experts, pairs)
    hot = expert[:, None] == jnp.arange(experts, dtype=expert.dtype)[None, :]
    hot = (hot if active is None else hot & active[:, None]).astype(jnp.int32)
    counts = jnp.sum(hot, axis=0)
    last = jnp.cumsum(-(-counts // rows))
    first = last - -(-counts // rows)
    rank = jnp.sum((jnp.cumsum(hot, axis=0) - hot) * hot, axis=1)
    place = first[expert] * rows + rank
    source = jnp.full((groups * rows,), pairs * groups, jnp.int32)
    taken = place if active is None else jnp.where(active, place, groups * rows)
    source = source.at[taken].set(jnp.arange(pairs, dtype=jnp.int32), mode="drop")
    number = jnp.arange(groups, dtype=jnp.int32)
    owner = jnp.sum((number[:, None] >= last[None, :]).astype(jnp.int32), axis=1)
    return place, jnp.minimum(owner, experts - 1), source, last[-1]


def clipped_swiglu(x: Float[Array, "n twice"], limit: float) -> Float[Array, "n f"]:
    """``silu(min(gate, limit)) * clip(up, +-limit)``, gate first, in float32."""
    gate, up = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    gated = jax.nn.silu(jnp.minimum(gate, limit)) * jnp.clip(up, -limit, limit)
    return gated.astype(x.dtype)

"""The whole sequence at once, differentiable: for training, and to check the cached steps against.

Nothing here is shared with the cached steps but the model's own projections, so agreement of the
two says something. Windows are banded; every visible compressed row takes part, and routed layers
either attend all of them or only the indexer's picks.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from hybridkv.arithmetic import cdiv
from models.common import rotary_angles
from models.deepseek_v4.attention import Attention
from models.deepseek_v4.compressor import CellInput, Compressor
from models.deepseek_v4.config import DeepseekV4Config
from models.deepseek_v4.model import AttendInput, DeepseekV4


class IndexerLoss(NamedTuple):
    """Sum over queries of KL(attention over rows || indexer over rows), and the queries counted."""

    divergence: jax.Array
    queries: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelOptions:
    """Static choices of a whole-sequence pass."""

    sparse: bool = True
    """Attend only the indexer's picks; off, all visible rows (the indexer's warm-up)."""
    indexer_loss: bool = False
    indexer_stride: int = 1
    """Every how many queries the indexer's loss looks at; more is cheaper and noisier."""
    expert_rows: int = 64
    """Tokens of one expert multiplied at a time."""
    dense_experts: bool = False
    """Multiply every token by every expert: the faster way for few experts on a CPU."""


def parallel_forward(
    model: DeepseekV4, tokens: Int[Array, "b t"], options: ParallelOptions = ParallelOptions()
) -> tuple[Float[Array, "b t vocab"], tuple[IndexerLoss | None, ...]]:
    """Logits of every position of sequences that start at position 0, and each layer's loss."""
    logits, losses, _ = observed_forward(model, tokens, options)
    return logits, losses


class Observed(NamedTuple):
    """What ``observed_forward`` returns, for training."""

    logits: jax.Array
    losses: tuple[IndexerLoss | None, ...]
    loads: tuple[jax.Array, ...]
    """A layer's share of the picks by expert: float32 ``[experts]``, summing to 1."""


def observed_forward(
    model: DeepseekV4, tokens: Int[Array, "b t"], options: ParallelOptions = ParallelOptions()
) -> Observed:
    """``parallel_forward`` that also tells how the experts were loaded."""
    config = model.config
    loads: list[jax.Array] = []
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)

    def attend(inputs: AttendInput, layer: int) -> tuple[jax.Array, IndexerLoss | None]:
        return _attend(inputs, layer, config, options)

    hidden, losses = model(
        tokens,
        positions,
        attend,
        range(config.layers),
        rows=options.expert_rows,
        differentiable=True,
        dense=options.dense_experts,
        loads=loads,
    )
    return Observed(model.logits(hidden), losses, tuple(loads))


def _attend(
    inputs: AttendInput, layer: int, config: DeepseekV4Config, options: ParallelOptions
) -> tuple[jax.Array, IndexerLoss | None]:
    attention, x, positions, angles = inputs
    latent = attention.latent(x)
    q = attention.queries(latent, angles).astype(jnp.float32)
    rows = attention.rows(x, angles).astype(jnp.float32)
    band, local_scores = _band_scores(q, rows, config.window, attention.scale)
    loss = None
    if attention.compressor is None:
        (weights,) = _softmax_with_sink((local_scores,), attention.sink[...])
        out = _band_values(weights, band)
        return attention.output(out.astype(x.dtype), angles), None
    ratio = attention.compressor.ratio
    frequencies = config.layer_rope(layer).frequencies(config.rope_dim)
    keys = _all_rows(attention.compressor, x, positions, frequencies).astype(jnp.float32)
    seen = jnp.arange(keys.shape[1])[None, :] < (positions[0, :, None] + 1) // ratio
    scores = jnp.einsum("bthc,bsc->bths", q, keys) * attention.scale
    allowed = seen[None]
    if attention.indexer is not None:
        index_keys = _index_keys(attention, x, positions, frequencies)
        if options.sparse:
            index = _index_scores(attention, inputs, latent, jax.lax.stop_gradient(index_keys))
            index = jax.lax.stop_gradient(index)
            allowed = allowed & _picked(jnp.where(seen[None], index, -jnp.inf), attention.topk)
        if options.indexer_loss:
            some = slice(None, None, options.indexer_stride)
            part = jax.tree.map(lambda a: a[:, some], (x, positions, angles))
            index = _index_scores(
                attention, AttendInput(attention, *part), latent[:, some], index_keys
            )
            index = jnp.where(seen[None, some], index, -jnp.inf)
            loss = _indexer_loss(scores[:, some], index, allowed[:, some])
    scores = jnp.where(allowed[:, :, None, :], scores, -jnp.inf)
    local, far = _softmax_with_sink((local_scores, scores), attention.sink[...])
    out = _band_values(local, band) + jnp.einsum("bths,bsc->bthc", far, keys)
    return attention.output(out.astype(x.dtype), angles), loss


def _bands(x: Float[Array, "b t c"], window: int) -> Float[Array, "b chunks two_windows c"]:
    """Each chunk of ``window`` tokens with the chunk before it."""
    b, t, c = x.shape
    chunks = cdiv(t, window)
    own = jnp.pad(x, ((0, 0), (0, chunks * window - t), (0, 0))).reshape(b, chunks, window, c)
    before = jnp.pad(own, ((0, 0), (1, 0), (0, 0), (0, 0)))[:, :-1]
    return jnp.concatenate([before, own], axis=2)


def _band_scores(
    q: Float[Array, "b t h c"], rows: Float[Array, "b t c"], window: int, scale: float
) -> tuple[Float[Array, "b chunks keys c"], Float[Array, "b t h keys"]]:
    b, t, h, c = q.shape
    band = _bands(rows, window)
    chunks = band.shape[1]
    padded = jnp.pad(q, ((0, 0), (0, chunks * window - t), (0, 0), (0, 0)))
    chunked = padded.reshape(b, chunks, window, h, c)
    scores = jnp.einsum("bgqhc,bgkc->bgqhk", chunked, band) * scale
    query, key = jnp.arange(window)[:, None], jnp.arange(2 * window)[None, :] - window
    near = (key <= query) & (key > query - window)
    exists = (jnp.arange(chunks)[:, None, None] > 0) | (key >= 0)[None]
    visible = (near[None] & exists)[None, :, :, None, :]
    scores = jnp.where(visible, scores, -jnp.inf)
    return band, scores.reshape(b, chunks * window, h, 2 * window)[:, :t]


def _band_values(
    weights: Float[Array, "b t h keys"], band: Float[Array, "b chunks keys c"]
) -> Float[Array, "b t h c"]:
    b, t, h, keys = weights.shape
    chunks, window = band.shape[1], keys // 2
    padded = jnp.pad(weights, ((0, 0), (0, chunks * window - t), (0, 0), (0, 0)))
    out = jnp.einsum("bgqhk,bgkc->bgqhc", padded.reshape(b, chunks, window, h, keys), band)
    return out.reshape(b, chunks * window, h, -1)[:, :t]


def _softmax_with_sink(
    parts: tuple[Float[Array, "b t h _"], ...], sink: Float[Array, " h"]
) -> tuple[Float[Array, "b t h _"], ...]:
    """Softmax over all parts together, whose denominator also holds ``exp(sink)``.

    Parts stay apart: joining them would copy the largest arrays of the whole pass.
    """
    bias = sink[None, None, :, None]
    top = bias
    for part in parts:
        top = jnp.maximum(top, jnp.max(part, -1, keepdims=True))
    top = jax.lax.stop_gradient(top)
    weights = [jnp.exp(part - top) for part in parts]
    total = jnp.exp(bias - top)
    for weight in weights:
        total = total + jnp.sum(weight, -1, keepdims=True)
    return tuple(weight / total for weight in weights)


def _all_rows(
    compressor: Compressor,
    x: Float[Array, "b t hidden"],
    positions: Int[Array, "b t"],
    frequencies: np.ndarray,
) -> Float[Array, "b cells width"]:
    """Rows of every complete cell of sequences that start at position 0."""
    ratio = compressor.ratio
    cells = x.shape[1] // ratio
    kv, gate = compressor.project(x[:, : cells * ratio], positions[:, : cells * ratio])
    shape = (x.shape[0], cells, ratio, -1)
    pooled = _pool(CellInput(kv.reshape(shape), gate.reshape(shape)), compressor)
    first = jnp.broadcast_to(jnp.arange(cells, dtype=jnp.int32) * ratio, pooled.shape[:2])
    return compressor.finish(pooled, rotary_angles(first, frequencies))


def _pool(cells: CellInput, compressor: Compressor) -> Float[Array, "b cells width"]:
    width = compressor.norm.weight[...].shape[0]
    kv, gate = cells
    if kv.shape[-1] == 2 * width:  # overlap: the first half went to the next cell
        pad = ((0, 0), (1, 0), (0, 0), (0, 0))
        earlier = jnp.pad(kv[:, :-1, :, :width], pad)
        closed = jnp.pad(gate[:, :-1, :, :width], pad, constant_values=-jnp.inf)
        kv = jnp.concatenate([earlier, kv[..., width:]], axis=2)
        gate = jnp.concatenate([closed, gate[..., width:]], axis=2)
    return jnp.sum(jax.nn.softmax(gate, axis=2) * kv, axis=2)


def _index_keys(
    attention: Attention,
    x: Float[Array, "b t hidden"],
    positions: Int[Array, "b t"],
    frequencies: np.ndarray,
) -> Float[Array, "b rows c"]:
    assert attention.indexer is not None
    x = jax.lax.stop_gradient(x)
    return _all_rows(attention.indexer.compressor, x, positions, frequencies)


def _index_scores(
    attention: Attention, inputs: AttendInput, latent: jax.Array, keys: Float[Array, "b rows c"]
) -> Float[Array, "b t rows"]:
    """Index scores; gradients reach the indexer only, never the rest of the model."""
    assert attention.indexer is not None
    x, latent = jax.lax.stop_gradient((inputs.x, latent))
    queries, weights = attention.indexer.query(x, latent, inputs.angles)
    hits = jax.nn.relu(jnp.einsum("bthc,bsc->bths", queries, keys).astype(jnp.float32))
    return jnp.einsum("bths,bth->bts", hits, weights)


def _picked(scores: Float[Array, "b t rows"], topk: int) -> Bool[Array, "b t rows"]:
    """Whether a row is among the ``topk`` best; ties go to the lowest row."""
    rows = scores.shape[-1]
    if rows <= topk:
        return jnp.ones(scores.shape, bool)
    ranked = jax.lax.stop_gradient(scores)
    best = jax.lax.top_k(jnp.where(ranked == 0.0, 0.0, ranked), topk)[1]
    b, t = scores.shape[:2]
    picked = jnp.zeros(scores.shape, bool)
    return picked.at[jnp.arange(b)[:, None, None], jnp.arange(t)[None, :, None], best].set(True)


def _indexer_loss(
    scores: Float[Array, "b t h rows"],
    index: Float[Array, "b t rows"],
    allowed: Bool[Array, "b t rows"],
) -> IndexerLoss:
    """KL from the heads' mean attention over allowed rows to the indexer's softmax over them."""
    some = jnp.any(allowed, axis=-1)
    blank = jnp.where(some[..., None], allowed, True)
    masked = jnp.where(blank[:, :, None, :], jax.lax.stop_gradient(scores), -jnp.inf)
    target = jnp.mean(jax.nn.softmax(masked, axis=-1), axis=2)
    log_index = jax.nn.log_softmax(jnp.where(blank, index, -jnp.inf), axis=-1)
    log_index = jnp.where(blank, log_index, 0.0)
    terms = jax.scipy.special.xlogy(target, target) - target * log_index
    divergence = jnp.where(some, jnp.sum(terms, axis=-1), 0.0)
    return IndexerLoss(jnp.sum(divergence), jnp.sum(some))

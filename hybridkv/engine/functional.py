"""A model given as functions: one ``forward`` for prompts, decoding and training."""

from collections.abc import Callable
from typing import Any

import jax

from hybridkv.errors import UserError
from hybridkv.geometry import Geometry
from hybridkv.state.attend import Attend, check_plain
from hybridkv.state.batch import DecodeBatch, StepOptions, TileBatch
from hybridkv.state.cache import Cache
from hybridkv.state.lanes import lanes_in_turn
from hybridkv.state.tokens import Tokens

Forward = Callable[[Any, jax.Array, jax.Array, Any], jax.Array]
"""(params, tokens ``[n, t]``, positions ``[n, t]``, attend) to hidden states ``[n, t, hidden]``."""
Logits = Callable[[Any, jax.Array], jax.Array]
"""(params, hidden ``[*n, hidden]``) to logits ``[*n, vocab]``."""


class FunctionModel:
    """Your model as the engine takes it (a ``StepModel``).

    ``forward`` is called with tokens of ``n`` sequences, ``t`` consecutive ones each, and an
    ``attend`` that its layers call as ``o = attend(layer, q, k, v)``: see
    ``hybridkv.state.attend.Attend``. No result of a token may depend on other tokens in any other
    way, and nothing may depend on ``n`` or ``t``.
    """

    def __init__(
        self,
        *,
        geometry: Geometry,
        vocab_size: int,
        params: Any,
        forward: Forward,
        logits: Logits,
        pad_token: int | None = None,
    ) -> None:
        """Keeps the functions; compiles nothing.

        Args:
          geometry: what each layer keeps: a window, or a row a token (ratio 1), each row
            ``2 * kv_heads * width`` channels wide.
          vocab_size: token ids are ``0 ... vocab_size - 1``.
          params: what ``forward`` and ``logits`` get first: any pytree of arrays.
          forward: see ``Forward``; pure.
          logits: see ``Logits``; pure. Apart from ``forward`` because of a prompt only the last
            token's are wanted.
          pad_token: the id that pads batches elsewhere; prompts that start with it are refused.

        Raises:
          UserError: a layer of the geometry compresses or routes, or none stores rows, so that
            there would be nothing to share.
        """
        for number, layer in enumerate(geometry.layers):
            check_plain(number, layer)
        if not geometry.ratios:
            raise UserError(
                "no layer stores rows, so prompts would share nothing: at least one must be "
                "LayerGeometry(ratio=1)"
            )
        if vocab_size < 1:
            raise UserError(f"vocab_size must be at least 1, got {vocab_size}")
        self.geometry = geometry
        self.vocab_size = vocab_size
        self.pad_token = pad_token
        # A flat list: flattening a module's state anew costs milliseconds a call.
        self.params, self._structure = jax.tree.flatten(params)
        self.forward, self.logits = forward, logits

    def tile_step(
        self, params: list[jax.Array], batch: TileBatch, cache: Cache, options: StepOptions
    ) -> tuple[jax.Array, Cache]:
        """Consumes prompt tokens; see ``StepModel.tile_step``."""

        def step(batch: TileBatch, cache: Cache) -> tuple[jax.Array, Cache]:
            attend = Attend(Tokens.of_tile(batch, cache), cache, options)
            return self._run(params, attend, every_token=options.all_logits)

        if options.sequential and options.lanes > 1:
            return lanes_in_turn(step, batch, cache)
        return step(batch, cache)

    def decode_step(
        self, params: list[jax.Array], batch: DecodeBatch, cache: Cache, options: StepOptions
    ) -> tuple[jax.Array, Cache]:
        """Consumes one token a slot; see ``StepModel.decode_step``."""
        attend = Attend(Tokens.of_decode(batch, cache), cache, options)
        return self._run(params, attend, every_token=False)

    def _run(
        self, flat: list[jax.Array], attend: Attend, *, every_token: bool
    ) -> tuple[jax.Array, Cache]:
        params, tokens = jax.tree.unflatten(self._structure, flat), attend.tokens
        hidden = self.forward(params, tokens.tokens, tokens.positions, attend)
        shape = tokens.tokens.shape
        if hidden.ndim != 3 or hidden.shape[:2] != shape:
            raise UserError(
                f"forward must return hidden states [{shape[0]}, {shape[1]}, hidden], one a token; "
                f"got {list(hidden.shape)}"
            )
        cache = attend.cache()
        wanted = hidden if every_token else tokens.last(hidden)
        logits = self.logits(params, wanted).astype("float32")
        form = (*wanted.shape[:-1], self.vocab_size)
        if logits.shape != form:
            raise UserError(
                f"logits of hidden states {list(wanted.shape)} must be {list(form)}; got "
                f"{list(logits.shape)}"
            )
        return logits, cache

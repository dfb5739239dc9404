"""What the engine asks of a model. ``hybridkv`` never imports ``models``."""

from typing import Any, Protocol

import jax

from hybridkv.geometry import Geometry
from hybridkv.state.batch import DecodeBatch, StepOptions, TileBatch
from hybridkv.state.cache import Cache


class StepModel(Protocol):
    """A model as two pure functions over its parameters, a batch and a cache."""

    @property
    def geometry(self) -> Geometry:
        """What its cache is made of."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids are ``0 ... vocab_size - 1``."""
        ...

    @property
    def pad_token(self) -> int | None:
        """The id that pads batches elsewhere, if there is one; no prompt here starts with it."""
        ...

    @property
    def params(self) -> Any:
        """The parameters: any pytree."""
        ...

    def tile_step(
        self, params: Any, batch: TileBatch, cache: Cache, options: StepOptions
    ) -> tuple[jax.Array, Cache]:
        """Consumes prompt tokens; float32 logits ``[lanes, vocab]`` of each lane's last."""
        ...

    def decode_step(
        self, params: Any, batch: DecodeBatch, cache: Cache, options: StepOptions
    ) -> tuple[jax.Array, Cache]:
        """Consumes one token a slot; float32 logits ``[slots, vocab]``."""
        ...

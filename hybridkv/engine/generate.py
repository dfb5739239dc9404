"""One sequence from prompt to last token, over a cache of its own."""

import dataclasses
import time
from collections.abc import Iterator, Mapping

import jax
import numpy as np

from hybridkv.arithmetic import cdiv, round_up
from hybridkv.engine.protocol import StepModel
from hybridkv.engine.sampling import Sampler, SamplingBatch, SamplingOptions, tokens_seen
from hybridkv.engine.steps import Steps, prompt_tiles
from hybridkv.errors import UserError
from hybridkv.state.batch import DecodeBatch, StepOptions
from hybridkv.state.cache import Cache, assign_in_order, cache_bytes
from hybridkv.state.capacity import Capacity


@dataclasses.dataclass(kw_only=True)
class GenerationStats:
    """What one generation cost."""

    prompt_tokens: int
    new_tokens: int = 0
    time_to_first_token_s: float = 0.0
    decode_seconds: float = 0.0
    """From the first new token to the last."""
    cache_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Bytes that the sequence occupies at its end, by kind, in whole blocks."""

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens over the time to the first new one."""
        return self.prompt_tokens / self.time_to_first_token_s if self.new_tokens else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """New tokens after the first, over the time they took."""
        return (self.new_tokens - 1) / self.decode_seconds if self.decode_seconds else 0.0


def check_prompt(
    model: StepModel,
    prompt: np.ndarray,
    *,
    max_new_tokens: int,
    capacity_tokens: int,
    mask: np.ndarray | None = None,
) -> np.ndarray:
    """The prompt as int32, or a refusal before any work.

    Args:
      model: whose vocabulary and padding token count.
      prompt: integer ``[tokens]``.
      max_new_tokens: tokens to generate after it.
      capacity_tokens: tokens the cache holds.
      mask: as tokenizers return it, truth where a token is real; padding on the right is dropped.

    Raises:
      UserError: the prompt is empty, padded on the left, has ids outside the vocabulary or of a
        float dtype, or does not fit together with ``max_new_tokens``.
    """
    if prompt.ndim != 1 or not np.issubdtype(prompt.dtype, np.integer):
        raise UserError(
            f"token ids must be a one-dimensional integer array, got {prompt.dtype} "
            f"{list(prompt.shape)}: pass np.asarray(ids, np.int32)"
        )
    if mask is not None:
        prompt = _unpadded(prompt, mask)
    if not len(prompt):
        raise UserError("the prompt is empty: give at least one token")
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    outside = prompt[(prompt < 0) | (prompt >= model.vocab_size)]
    if len(outside):
        raise UserError(
            f"token id {int(outside[0])} is outside the vocabulary: ids are 0 to "
            f"{model.vocab_size - 1}"
        )
    if model.pad_token is not None and prompt[0] == model.pad_token:
        raise UserError(LEFT_PADDING)
    needed = len(prompt) + max_new_tokens
    if needed > capacity_tokens:
        raise UserError(
            f"{len(prompt)} prompt tokens and {max_new_tokens} new ones need {needed} tokens of "
            f"cache; the capacity is {capacity_tokens}: raise the context or shorten the prompt"
        )
    return prompt.astype(np.int32)


LEFT_PADDING = (
    "the prompt is padded on the left: pads would enter the compressed rows and move every cell "
    "boundary, so pass it unpadded (sequences need not be of one length)"
)


def _unpadded(prompt: np.ndarray, mask: np.ndarray) -> np.ndarray:
    if mask.shape != prompt.shape:
        raise UserError(f"the mask has shape {list(mask.shape)}, the prompt {list(prompt.shape)}")
    real = mask.astype(bool)
    count = int(real.sum())
    if not real[:count].all():
        raise UserError(LEFT_PADDING)
    return prompt[:count]


class Generator:
    """Compiles once for a capacity, then generates for one prompt after the other.

    Owns its cache: one ``stream`` at a time.
    """

    def __init__(self, model: StepModel, options: StepOptions, *, capacity_tokens: int) -> None:
        tokens = round_up(capacity_tokens, options.tile)
        # Only the last token's logits are sampled from.
        self.steps = Steps(model, dataclasses.replace(options, all_logits=False))
        self.capacity = Capacity.for_tokens(model.geometry, tokens=tokens, slots=1)
        self.capacity_tokens = tokens
        cache = Cache.init(model.geometry, self.capacity)
        self._cache = self.steps.warm_up(assign_in_order(cache))
        self._sampler = Sampler(vocab_size=model.vocab_size, slots=1)
        self._seen = self._sampler.warm_up(self._sampler.init_state(), *{options.lanes, 1})

    @property
    def bytes_by_kind(self) -> Mapping[str, int]:
        """Bytes of the allocated cache."""
        sizes = cache_bytes(self.steps.model.geometry, self.capacity)
        return {kind.value: size for kind, size in sizes.items()}

    def stream(
        self,
        prompt: np.ndarray,
        *,
        max_new_tokens: int,
        mask: np.ndarray | None = None,
        sampling: SamplingOptions = SamplingOptions(),
        stats: GenerationStats | None = None,
    ) -> Iterator[int]:
        """Yields new token ids one by one; fills ``stats`` as it goes.

        Args:
          prompt: integer ``[tokens]``.
          max_new_tokens: at most so many; the caller may stop earlier.
          mask: truth where a token of the prompt is real.
          sampling: how tokens are chosen.
          stats: an object to fill.

        Raises:
          UserError: see ``check_prompt``.
        """
        prompt = check_prompt(
            self.steps.model,
            prompt,
            max_new_tokens=max_new_tokens,
            capacity_tokens=self.capacity_tokens,
            mask=mask,
        )
        stats = stats if stats is not None else GenerationStats(prompt_tokens=0)
        stats.prompt_tokens = len(prompt)
        batch = SamplingBatch.of([sampling])
        began = time.perf_counter()
        token = jax.device_put(self._prefill(prompt, sampling))
        stats.time_to_first_token_s = time.perf_counter() - began
        began = time.perf_counter()
        active = jax.device_put(np.ones(1, bool))
        for count in range(1, max_new_tokens + 1):
            value = int(np.asarray(token)[0])  # indexing on the device would compile
            stats.new_tokens, stats.decode_seconds = count, time.perf_counter() - began
            used = self.steps.model.geometry.cache_bytes(len(prompt) + count)
            stats.cache_bytes = {kind.value: size for kind, size in used.items()}
            yield value
            if count < max_new_tokens:
                logits, self._cache = self.steps.decode(
                    DecodeBatch(tokens=token, active=active), self._cache
                )
                sampled, self._seen = self._sampler.sample(
                    logits, self._cache.lengths, batch, self._seen
                )
                token = sampled.tokens

    def _prefill(self, prompt: np.ndarray, sampling: SamplingOptions) -> np.ndarray:
        """The first new token, int32 ``[1]``, after all tiles of the prompt."""
        options, vocab = self.steps.options, self.steps.model.vocab_size
        self._seen = self._sampler.seat(self._seen, 0, tokens_seen(prompt, vocab))
        for batch in prompt_tiles(prompt, 0, options, slots=1):
            logits, self._cache = self.steps.tile(batch, self._cache)
        rows = SamplingBatch.of([sampling] + [None] * (options.lanes - 1))
        positions = jax.device_put(np.full(options.lanes, len(prompt), np.int32))
        sampled, self._seen = self._sampler.sample(logits, positions, rows, self._seen)
        return np.asarray(sampled.tokens)[:1]


def default_options(model: StepModel, *, tile_at_least: int = 128) -> StepOptions:
    """Options for one sequence on the default device."""
    block = model.geometry.block_tokens
    tile = block * max(cdiv(tile_at_least, block), 1)
    return StepOptions(tile=tile, sequential=jax.default_backend() == "cpu")

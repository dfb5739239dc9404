"""The executables around a model that does next to nothing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from geometries import toy_geometry

from hybridkv.engine.steps import DonatedCacheError, Steps, idle_decode, idle_tile, prompt_tiles
from hybridkv.state.batch import DecodeBatch, StepOptions
from hybridkv.state.cache import Cache, assign_in_order
from hybridkv.state.capacity import Capacity

OPTIONS = StepOptions(tile=16, lanes=2)


class Counting:
    """Knows how often it was traced; its logits are the tokens it was given."""

    def __init__(self) -> None:
        self.geometry = toy_geometry((4, 16))
        self.vocab_size, self.pad_token = 7, None
        self.params = [jnp.ones((2,))]
        self.traces = {"tile": 0, "decode": 0}

    def tile_step(self, params, batch, cache, options):
        self.traces["tile"] += 1
        lengths = cache.lengths.at[batch.slots].set(batch.ends, mode="drop")
        logits = batch.tokens.astype(jnp.float32) * params[0][0]
        return logits, dataclasses.replace(cache, lengths=lengths)

    def decode_step(self, params, batch, cache, options):
        self.traces["decode"] += 1
        lengths = cache.lengths + batch.active.astype(jnp.int32)
        return batch.tokens[:, None].astype(jnp.float32), dataclasses.replace(
            cache, lengths=lengths
        )


@pytest.fixture
def steps():
    return Steps(Counting(), OPTIONS)


def new_cache(steps: Steps) -> Cache:
    geometry = steps.model.geometry
    capacity = Capacity.for_tokens(geometry, tokens=64, slots=3)
    return assign_in_order(Cache.init(geometry, capacity))


@pytest.mark.parametrize("tile", [1, 8, 24, 130])
def test_a_tile_that_splits_a_block_is_refused(tile):
    with pytest.raises(ValueError, match=f"tile is {tile} tokens: use a multiple of .* block, 16"):
        Steps(Counting(), dataclasses.replace(OPTIONS, tile=tile))


def test_a_donated_cache_shows_the_right_call(steps):
    old = new_cache(steps)
    _, cache = steps.decode(idle_decode(3), old)
    with pytest.raises(
        DonatedCacheError, match=r"donated to an earlier step.*logits, cache = steps\.decode\(batch"
    ):
        steps.decode(idle_decode(3), old)
    with pytest.raises(DonatedCacheError, match=r"`logits, cache = steps\.tile\(batch, cache\)`"):
        steps.tile(idle_tile(OPTIONS, 3), old)
    _, newer = steps.tile(idle_tile(OPTIONS, 3), cache)
    with pytest.raises(DonatedCacheError):
        steps.tile(idle_tile(OPTIONS, 3), cache)
    steps.tile(idle_tile(OPTIONS, 3), newer)


def test_warm_up_changes_no_byte_and_later_steps_trace_nothing(steps):
    before = jax.tree.map(np.asarray, new_cache(steps))
    cache = steps.warm_up(new_cache(steps))
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(cache), strict=True):
        np.testing.assert_array_equal(old, new)
    for batch in prompt_tiles(np.arange(40), 1, OPTIONS, 3):
        _, cache = steps.tile(batch, cache)
    for _ in range(3):
        _, cache = steps.decode(
            DecodeBatch(tokens=jnp.zeros((3,), jnp.int32), active=jnp.arange(3) == 1), cache
        )
    assert steps.model.traces == {"tile": 1, "decode": 1}
    np.testing.assert_array_equal(cache.lengths, [0, 43, 0])


@pytest.mark.parametrize(
    ("length", "start", "parts"),
    [
        (1, 0, [(0, 1)]),
        (16, 0, [(0, 16)]),
        (17, 0, [(0, 16), (16, 17)]),
        (40, 16, [(16, 32), (32, 40)]),
        (32, 32, []),
        (0, 0, []),
    ],
)
def test_a_prompt_becomes_tiles_at_absolute_places(length, start, parts):
    ids = np.arange(length, dtype=np.int32) + 1
    batches = prompt_tiles(ids, 2, OPTIONS, 5, start=start)
    assert [(int(b.starts[0]), int(b.ends[0])) for b in batches] == parts
    for batch, (first, end) in zip(batches, parts, strict=True):
        assert batch.tokens.shape == (2, 16)
        assert batch.tokens.dtype == jnp.int32
        np.testing.assert_array_equal(batch.tokens[0, : end - first], ids[first:end])
        np.testing.assert_array_equal(batch.tokens[0, end - first :], 0)
        assert batch.slots.tolist() == [2, 5]  # the second lane is idle
        assert batch.starts[1] == batch.ends[1]


@pytest.mark.parametrize("start", [1, 8, 24])
def test_a_prompt_resumes_on_tile_boundaries_only(start):
    with pytest.raises(ValueError, match=f"start {start} is not a multiple of the tile, 16"):
        prompt_tiles(np.arange(40), 0, OPTIONS, 1, start=start)


def test_idle_batches_have_the_shapes_of_real_ones():
    real = prompt_tiles(np.arange(5), 0, OPTIONS, 3)[0]
    idle = idle_tile(OPTIONS, 3)
    assert jax.tree.map(jnp.shape, idle) == jax.tree.map(jnp.shape, real)
    assert jax.tree.map(lambda x: x.dtype, idle) == jax.tree.map(lambda x: x.dtype, real)
    assert (idle.slots == 3).all()
    assert (idle.starts == idle.ends).all()
    assert not idle_decode(3).active.any()

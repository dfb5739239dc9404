"""Law 1: a token's logits are the same bits whatever stands beside, before or behind it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exactness import check_idle_slot, check_neighbours, run, shuffled
from toy import decode, digest, empty_cache, prefill, prompt, toy_options, toy_runtime

from hybridkv import formats
from hybridkv.engine.steps import Steps
from hybridkv.state.cache import Cache

IDS = prompt(75)
NEW = prompt(40, seed=1)


@pytest.fixture(scope="module")
def runtime():
    return toy_runtime()


@pytest.fixture(scope="module")
def alone(runtime):
    return Steps(runtime, toy_options())


@pytest.fixture(scope="module")
def reference(alone):
    """Digests of prompt and decode logits of one sequence alone in a small cache."""
    return run(alone, empty_cache(alone), IDS, NEW)


def test_a_second_run_gives_the_same_bits(alone, reference):
    assert run(alone, empty_cache(alone), IDS, NEW) == reference


@pytest.mark.parametrize("tokens", [115, 2048])
def test_capacity_changes_no_bit(alone, reference, tokens):
    assert run(alone, empty_cache(alone, tokens=tokens), IDS, NEW) == reference


def test_order_of_blocks_changes_no_bit(alone, reference):
    cache = shuffled(empty_cache(alone, tokens=256))
    assert run(alone, cache, IDS, NEW) == reference


def _poison(cache: Cache, length: int) -> Cache:
    """NaN in every byte that a sequence of ``length`` tokens in slot 0 does not own."""
    geometry = cache.geometry

    def rows(pool: jax.Array, ratio: int) -> jax.Array:
        flat = pool.reshape(-1, pool.shape[-1])  # blocks stand in order
        used = jnp.arange(flat.shape[0]) < length // ratio
        return jnp.where(used[:, None], flat, jnp.nan).reshape(pool.shape)

    def ring(window: jax.Array) -> jax.Array:
        size = window.shape[1]
        kept = {p % size for p in range(max(length - size + 1, 0), length)}
        used = jnp.asarray([place in kept for place in range(size)])
        mine = jnp.arange(window.shape[0]) == 0
        return jnp.where((mine[:, None] & used[None, :])[..., None], window, jnp.nan)

    def tail(state, ratio):
        if state is None:
            return None
        open_rows = (jnp.arange(ratio) < length % ratio)[None, :, None]
        changes = {n: jnp.where(open_rows, getattr(state, n), jnp.nan) for n in ("kv", "gate")}
        if state.earlier_kv is not None and length < ratio:
            for name in ("earlier_kv", "earlier_gate"):
                changes[name] = jnp.full_like(getattr(state, name), jnp.nan)
        return dataclasses.replace(state, **changes)

    layers = []
    for number, layer in enumerate(geometry.layers):
        own = cache.layer(number)
        layers.append(
            dataclasses.replace(
                own,
                rows=None if own.rows is None else rows(own.rows, layer.ratio),
                index=None if own.index is None else rows(own.index, layer.ratio),
                window=ring(own.window),
                tail=tail(own.tail, layer.ratio),
                index_tail=tail(own.index_tail, layer.ratio),
            )
        )
    return cache.with_layers(tuple(layers), cache.lengths)


@pytest.mark.parametrize("cut", [0, 1, 3, 4, 7, 16, 31, 32])
def test_nan_in_every_unused_byte_changes_no_bit(alone, reference, cut):
    """Poisoned before the prompt, inside it (tile boundaries) and before each decode step."""
    cache = _poison(empty_cache(alone, tokens=256), 0)
    logits, cache = prefill(alone, cache, IDS)
    assert digest(logits) == reference[0]
    rows, length = [], len(IDS)
    for i, token in enumerate(NEW):
        if i >= cut:
            cache = _poison(cache, length + i)
        row, cache = decode(alone, cache, np.asarray([token]))
        rows.append(row[0])
    assert digest(np.stack(rows)) == reference[1]


def test_where_a_prompt_ends_changes_no_earlier_bit(alone):
    whole, _ = prefill(alone, empty_cache(alone), IDS)
    for end in (1, 3, 4, 5, 15, 16, 17, 31, 32, 33, 47, 64, 74):
        part, _ = prefill(alone, empty_cache(alone), IDS[:end])
        assert digest(part) == digest(whole[:end]), end


def test_decoding_tokens_then_prompting_the_rest_stays_close(alone):
    """Two executables need not give the same bits, but must compute the same function."""
    whole, _ = prefill(alone, empty_cache(alone), IDS)
    for start in (1, 15, 16, 17, 40):
        logits, cache = prefill(alone, empty_cache(alone), IDS[:start])
        after, _ = decode(alone, cache, IDS[start:])
        np.testing.assert_allclose(
            np.concatenate([logits, after]), whole, atol=2e-5, rtol=1e-5, err_msg=str(start)
        )


@pytest.mark.parametrize("sequential", [True, False], ids=["sequential", "batched"])
def test_lane_and_neighbours_change_no_bit(runtime, sequential):
    steps = Steps(runtime, toy_options(lanes=3, sequential=sequential))
    check_neighbours(steps, IDS, NEW[:20])


def test_idle_slots_keep_every_byte(runtime):
    check_idle_slot(Steps(runtime, toy_options()), IDS, NEW)


def test_bfloat16_rows_are_exact_too():
    """A rounded cache is another model, but as exact a one."""
    steps = Steps(toy_runtime(formats.BFLOAT16), toy_options())
    runs = [run(steps, empty_cache(steps, tokens=tokens), IDS, NEW) for tokens in (115, 512)]
    assert runs[0] == runs[1]

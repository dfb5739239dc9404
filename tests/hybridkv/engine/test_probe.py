"""The probe passes where sequences do not meet, and fails where a model lets them."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import decode, digest, prefill, prompt, toy_options, toy_runtime

from hybridkv.engine.guard import CompileGuard
from hybridkv.engine.probe import Probe, probe
from hybridkv.engine.steps import Steps
from hybridkv.state.cache import Cache, assign_in_order
from hybridkv.state.capacity import Capacity
from models.llama.runtime import LlamaRuntime
from models.llama.toy import toy_llama

TILE = 32
FAULTS = ("tile_company", "tile_lane", "decode_company", "decode_slot", "state", "blocks")
AGREE = "logits and written bytes agree over {} lanes and {} slots"


def mean(logits, active):
    """Over what is computed, one row."""
    total = jnp.sum(jnp.where(active[:, None], logits, 0.0), axis=0, keepdims=True)
    return total / jnp.sum(active.astype(jnp.float32))


def numbers(logits):
    return jnp.arange(logits.shape[0], dtype=jnp.float32)[:, None]


def add_to_window(cache, by):
    """Adds a number of each slot to one row of its window."""
    window = cache.sequence.window
    first = window.layers[0]
    layers = (first.at[:, 1].add(by[:, None].astype(first.dtype)), *window.layers[1:])
    window = dataclasses.replace(window, layers=layers)
    sequence = dataclasses.replace(cache.sequence, window=window)
    return dataclasses.replace(cache, sequence=sequence)


def add_to_blocks(cache, by):
    """Adds one number to the first row of every slot's first block."""
    own = cache.block_table[:, 0]

    def spoiled(pool):
        return None if pool is None else pool.at[own, 0].add(by.astype(pool.dtype), mode="drop")

    layers = tuple(spoiled(pool) for pool in cache.compressed.layers)
    rows = dataclasses.replace(cache.compressed, layers=layers)
    return dataclasses.replace(cache, compressed=rows)


class Faulty:
    """The TOY model with faults that its parameters switch on, so that it is compiled once."""

    def __init__(self) -> None:
        self.sound = toy_runtime()
        self.geometry, self.vocab_size = self.sound.geometry, self.sound.vocab_size
        self.pad_token = self.sound.pad_token
        self.fault(None)

    def fault(self, name: str | None) -> None:
        """Switches on one fault, or none."""
        sizes = {fault: np.float32(1e-3 * (fault == name)) for fault in FAULTS}
        self.params = (self.sound.params, jax.device_put(sizes))

    def tile_step(self, params, batch, cache, options):
        sound, size = params
        logits, cache = self.sound.tile_step(sound, batch, cache, options)
        active = batch.ends > batch.starts
        logits = logits + size["tile_company"] * mean(logits, active)
        return logits + size["tile_lane"] * numbers(logits), cache

    def decode_step(self, params, batch, cache, options):
        sound, size = params
        logits, cache = self.sound.decode_step(sound, batch, cache, options)
        slots = jnp.arange(cache.slots, dtype=jnp.int32)
        cache = add_to_window(cache, slots * (size["state"] > 0).astype(jnp.int32))
        count = jnp.sum(batch.active.astype(jnp.int32))
        cache = add_to_blocks(cache, count * (size["blocks"] > 0).astype(jnp.int32))
        logits = logits + size["decode_company"] * mean(logits, batch.active)
        return logits + size["decode_slot"] * numbers(logits), cache


def built(model, *, lanes=2, slots=3, blocks=None, all_logits=False) -> tuple[Steps, Cache]:
    """Steps that are warm, and an empty cache."""
    steps = Steps(model, toy_options(lanes=lanes, tile=TILE, all_logits=all_logits))
    cache = steps.warm_up(empty(model, slots=slots, blocks=blocks))
    return steps, steps.warm_up_moves(cache)


def empty(model, *, slots=3, blocks=None) -> Cache:
    capacity = Capacity.for_tokens(model.geometry, tokens=3 * TILE, slots=slots)
    capacity = dataclasses.replace(capacity, blocks=blocks or capacity.blocks)
    return Cache.init(model.geometry, capacity)


@pytest.fixture(scope="module")
def steps() -> Steps:
    return built(Faulty())[0]


@pytest.fixture
def with_fault(steps):
    """What the probe finds at one fault."""

    def found(name: str | None) -> Probe:
        steps.model.fault(name)
        return probe(steps, empty(steps.model))[0]

    yield found
    steps.model.fault(None)


def test_the_toy_model_passes(with_fault):
    expected = Probe(lanes_exact=True, neighbours_exact=True, detail=AGREE.format(2, 3))
    assert with_fault(None) == expected
    assert expected.exact


@pytest.mark.parametrize(
    "sizes",
    [
        {"lanes": 1, "slots": 2},
        {"lanes": 3, "slots": 4, "all_logits": True},
        {"lanes": 4, "slots": 2},  # more lanes than slots
        {"lanes": 2, "slots": 3, "blocks": 1},  # no room for a whole tile, nor for a neighbour
    ],
)
def test_another_model_passes_in_every_size(sizes):
    found, _ = probe(*built(LlamaRuntime(toy_llama()), **sizes))
    assert found.exact, found.detail
    assert found.detail == AGREE.format(sizes["lanes"], sizes["slots"])


def test_one_slot_has_nothing_to_compare_and_runs_nothing(steps, monkeypatch):
    monkeypatch.setattr(steps, "tile", None)
    cache = empty(steps.model, slots=1)
    found, after = probe(steps, cache)
    assert found.exact
    assert after is cache
    assert found.detail == "one slot: there is no other place and no neighbour"


ALONE, MOVED = "'alone'", "'alone in the last slot'"
FIRST, LAST = "'first among neighbours'", "'last among the same neighbours'"


@pytest.mark.parametrize(
    ("fault", "lanes", "neighbours", "detail"),
    [
        ("tile_lane", False, True, f"tile logits differ in 64 of 64 .* {FIRST} and {LAST}$"),
        ("decode_slot", False, True, f"decode logits differ in 64 of 64 .* {ALONE} and {MOVED}$"),
        ("state", False, True, f"state differ in .* {ALONE} and {MOVED}$"),
        ("blocks", True, False, f"blocks differ in .* {ALONE} and {FIRST}$"),
        ("tile_company", None, False, f"tile logits differ in .* {ALONE} and {FIRST}$"),
        ("decode_company", None, False, f"decode logits differ in .* {ALONE} and {FIRST}$"),
    ],
)
def test_a_fault_is_found_and_named(with_fault, fault, lanes, neighbours, detail):
    """A sum over companions may also round otherwise in another order, so lanes are left open."""
    found = with_fault(fault)
    assert found.neighbours_exact == neighbours
    assert lanes is None or found.lanes_exact == lanes
    assert not found.exact
    assert "\n" not in found.detail
    assert any(re.search(detail, part) for part in found.detail.split("; ")), found.detail


def test_the_probe_compiles_nothing_and_takes_ten_steps(steps, monkeypatch):
    cache, counted = empty(steps.model), []
    for name in ("tile", "decode"):
        step = getattr(steps, name)
        monkeypatch.setattr(
            steps, name, lambda *a, name=name, step=step: (counted.append(name), step(*a))[1]
        )
    guard = CompileGuard(mode="raise")
    guard.arm()
    probe(steps, cache)
    guard.check()
    assert (counted.count("tile"), counted.count("decode")) == (5, 5)


def test_the_cache_comes_back_ready_for_a_first_sequence():
    steps, cache = built(LlamaRuntime(toy_llama()), all_logits=True)
    ids = prompt(45)

    def run(cache: Cache) -> tuple[str, str]:
        tile, after = prefill(steps, cache, ids, slot=1)
        return digest(tile), digest(decode(steps, after, ids[:3], slot=1)[0])

    cold = run(assign_in_order(cache))
    cache = assign_in_order(empty(steps.model))
    table = np.array(cache.block_table)
    found, cache = probe(steps, cache)
    assert found.exact
    np.testing.assert_array_equal(cache.block_table, table)
    np.testing.assert_array_equal(cache.lengths, np.zeros(3, np.int32))
    assert run(cache) == cold


def test_a_cache_with_sequences_is_refused(steps):
    lengths = jax.device_put(np.array([0, 4, 0], np.int32))
    cache = dataclasses.replace(empty(steps.model), lengths=lengths)
    with pytest.raises(ValueError, match="give it a cache without sequences"):
        probe(steps, cache)

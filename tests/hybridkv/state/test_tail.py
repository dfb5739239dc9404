"""The tail after some tokens against a walk over tokens one by one."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from geometries import SHARED, toy_geometry

from hybridkv.geometry import LayerGeometry
from hybridkv.state import leaf
from hybridkv.state.capacity import Capacity
from hybridkv.state.tail import CompressorTail, Tails, tail_after

after = jax.jit(tail_after)
WIDTH = 3


def before(count: int, ratio: int, overlap: bool) -> CompressorTail:
    """Tails that hold marks of their own."""
    halves = 2 if overlap else 1
    shape = (count, ratio, WIDTH * halves)
    marks = jnp.full((count, ratio, WIDTH), -5.0)
    return CompressorTail(
        kv=jnp.full(shape, -1.0),
        gate=jnp.full(shape, -2.0),
        earlier_kv=marks if overlap else None,
        earlier_gate=marks - 1 if overlap else None,
    )


def walk(tokens: np.ndarray, ratio: int, earlier: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows of the open cell, and the overlap half of the last complete one."""
    cell: list[np.ndarray] = []
    for token in tokens:
        cell.append(token)
        if len(cell) == ratio:
            earlier, cell = np.stack(cell)[:, :WIDTH], []
    return np.asarray(cell).reshape(-1, tokens.shape[-1]), earlier


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("ratio", [2, 4, 16])
def test_a_tail_holds_the_open_cell_and_the_last_complete_one(ratio, overlap):
    tile = 16
    cases = list(itertools.product((0, ratio, 5 * ratio), range(tile + 1)))
    rng = np.random.default_rng(ratio)
    shape = (len(cases), tile, WIDTH * (2 if overlap else 1))
    kv, gate = rng.normal(size=(2, *shape)).astype(np.float32)
    tail = before(len(cases), ratio, overlap)
    first = jnp.asarray([f for f, _ in cases], jnp.int32)
    end = first + jnp.asarray([n for _, n in cases], jnp.int32)
    got = after(jnp.asarray(kv), jnp.asarray(gate), tail, first, end)
    assert jax.tree.structure(got) == jax.tree.structure(tail)
    for i, (_, count) in enumerate(cases):
        for name, source, mark in (("kv", kv, -5.0), ("gate", gate, -6.0)):
            opened, earlier = walk(source[i, :count], ratio, np.full((ratio, WIDTH), mark))
            held = np.asarray(getattr(got, name)[i])
            np.testing.assert_array_equal(held[: count % ratio], opened)
            if overlap:
                np.testing.assert_array_equal(getattr(got, f"earlier_{name}")[i], earlier)


def test_layers_have_the_tails_of_what_they_compress():
    geometry = toy_geometry((0, 4, 16, 4))
    tails = leaf.abstract(Tails.declare(geometry, Capacity.for_tokens(geometry, tokens=16)))
    assert [x is not None for x in tails.main] == [False, True, True, True]
    assert [x is not None for x in tails.index] == [False, True, False, True]
    assert tails.main[1].kv.shape == (1, 4, 32)
    assert tails.main[1].earlier_kv.shape == (1, 4, 16)
    assert tails.main[2].kv.shape == (1, 16, 16)
    assert tails.main[2].earlier_kv is None
    assert tails.index[1].gate.shape == (1, 4, 16)
    assert tails.index[1].earlier_gate.shape == (1, 4, 8)


def test_rows_of_one_token_and_shared_rows_have_no_tail():
    tails = Tails.declare(SHARED, Capacity.for_tokens(SHARED, tokens=2))
    assert [x is not None for x in tails.main] == [False, True, False, False, False]
    assert [x is not None for x in tails.index] == [False, True, False, False, False]


def test_tails_are_float32_and_lead_with_slots():
    layer = LayerGeometry(ratio=4, overlap=True)
    declared = CompressorTail.declare(
        layer, WIDTH, Capacity(blocks=1, slots=5, blocks_per_sequence=1)
    )
    leaves = jax.tree.leaves(declared, is_leaf=lambda x: isinstance(x, leaf.Leaf))
    assert {(x.shape[0], x.axes[0], x.dtype) for x in leaves} == {(5, "slots", jnp.float32)}

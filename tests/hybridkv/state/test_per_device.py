"""Kernels on a mesh give each sequence and head what one device gives it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from hybridkv.errors import UserError
from hybridkv.state import per_device
from pallas_kernels.attention import api as attention
from pallas_kernels.blocks import BlockRows
from pallas_kernels.index_scores import api as index_scores
from pallas_kernels.sequences import Active

N, HEADS, WIDTH, WINDOW, PER, BLOCKS = 2, 16, 128, 8, 8, 4
MESHES = [(1, 2), (2, 1)]


def mesh_of(shape):
    return jax.sharding.Mesh(np.array(jax.devices()[:2]).reshape(shape), ("data", "model"))


@pytest.fixture(scope="module")
def inputs():
    random = np.random.default_rng(3)

    def normal(*shape):
        return jnp.asarray(random.normal(size=shape), jnp.float32)

    table = jnp.asarray(random.permutation(N * BLOCKS).reshape(N, BLOCKS), jnp.int32)
    return {
        "q": normal(N, 1, HEADS, WIDTH),
        "local": normal(N, WINDOW, WIDTH),
        "first": jnp.asarray([5, 60], jnp.int32),
        "sink": normal(HEADS),
        "rows": BlockRows(normal(N * BLOCKS, PER, WIDTH), table),
        "visible": jnp.asarray([[3], [29]], jnp.int32),
        "active": Active.of(jnp.asarray([True, True])),
    }


def attend(by, inputs, **more):
    call = functools.partial(by, window=WINDOW, scale=0.1, key_block=16, **more)

    def run(given):
        arrays = dict(given)
        places = [arrays.pop(name) for name in ("q", "local", "first", "sink")]
        return call(*places, picks=None, **arrays)

    return jax.jit(run)(inputs)


@pytest.mark.parametrize("shape", MESHES)
def test_attention_is_split_and_the_same(inputs, shape):
    alone = attend(attention.attend, inputs)
    with jax.set_mesh(mesh_of(shape)):
        split = attend(per_device.attend, inputs)
    np.testing.assert_allclose(split, alone, rtol=1e-6, atol=1e-6)
    assert split.addressable_shards[0].data.shape == (N // shape[0], 1, HEADS // shape[1], WIDTH)


def test_without_a_mesh_nothing_is_split(inputs):
    alone = attend(attention.attend, inputs)
    np.testing.assert_array_equal(attend(per_device.attend, inputs), alone)


@pytest.mark.parametrize("shape", MESHES)
def test_an_idle_sequence_stays_idle_wherever_it_stands(inputs, shape):
    """The order of active sequences is made anew on each device."""
    idle = inputs | {"active": Active.of(jnp.asarray([False, True]))}
    poisoned = idle | {"q": inputs["q"].at[0].set(jnp.nan)}
    alone = attend(attention.attend, idle, sequential=True)
    with jax.set_mesh(mesh_of(shape)):
        split = attend(per_device.attend, poisoned, sequential=True)
    np.testing.assert_allclose(split[1], alone[1], rtol=1e-6, atol=1e-6)
    if shape[0] == 1:  # a device's only sequence is computed whether it is active or not
        assert np.all(np.isfinite(split[0]))


@pytest.mark.parametrize("shape", MESHES)
def test_picks_are_those_of_one_device(inputs, shape):
    random = np.random.default_rng(4)
    queries = jnp.asarray(random.normal(size=(N, 1, 4, WIDTH)), jnp.float32)
    weights = jnp.asarray(random.normal(size=(N, 1, 4)), jnp.float32)

    def pick(by, given):
        call = functools.partial(by, topk=8, key_block=16)

        def run(x):
            return call(queries, weights, x["rows"], x["visible"], active=x["active"])

        return jax.jit(run)(given)

    alone = pick(index_scores.pick_rows, inputs)
    with jax.set_mesh(mesh_of(shape)):
        split = pick(per_device.pick_rows, inputs)
    np.testing.assert_array_equal(split, alone)


@pytest.mark.parametrize("shape", MESHES)
def test_every_device_has_every_new_row(inputs, shape):
    pool, table = inputs["rows"]
    numbers = jnp.asarray([[3, 4], [29, 30]], jnp.int32)
    whole = jnp.asarray([[True, False], [True, True]])
    new = jnp.full((N, 2, WIDTH), 7.0)

    def write(pool):
        return per_device.write_rows(pool, table, numbers, whole, new, implementation="reference")

    alone = jax.jit(write)(pool)
    with jax.set_mesh(mesh_of(shape)):
        split = jax.jit(write)(pool)
    assert np.count_nonzero(alone == 7.0) == 3 * WIDTH
    for shard in split.addressable_shards:
        np.testing.assert_array_equal(shard.data, alone)


@pytest.mark.parametrize("shape", MESHES)
def test_no_kernel_is_left_to_the_partitioner_which_can_split_none(inputs, shape, monkeypatch):
    """Not even where no axis divides: one lane of prompt tokens, and an odd number of heads."""
    inside = []

    def noted(*arguments, kernel=attention.attend, **more):
        inside.append(set(jax.sharding.get_abstract_mesh().manual_axes))
        return kernel(*arguments, **more)

    odd = inputs | {
        "q": inputs["q"][:1, :, :3],
        "sink": inputs["sink"][:3],
        "local": inputs["local"][:1],
        "first": inputs["first"][:1],
        "rows": BlockRows(inputs["rows"].pool, inputs["rows"].table[:1]),
        "visible": inputs["visible"][:1],
        "active": Active.of(jnp.asarray([True])),
    }
    alone = attend(attention.attend, odd)
    monkeypatch.setattr(attention, "attend", noted)
    with jax.set_mesh(mesh_of(shape)):
        split = attend(per_device.attend, odd)
    assert inside == [{"data", "model"}]
    np.testing.assert_allclose(split, alone, rtol=1e-6, atol=1e-6)


def test_a_mesh_with_explicit_axes_is_refused_with_what_to_write():
    mesh = jax.make_mesh((2, 1), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh), pytest.raises(UserError, match=r"AxisType.Auto,\) \* 2"):
        per_device.on_mesh()
    with jax.set_mesh(mesh_of((2, 1))):
        assert per_device.on_mesh()
    one = jax.make_mesh((1, 1), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(one):  # nothing is split
        assert not per_device.on_mesh()

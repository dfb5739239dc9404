import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybridkv.state.leaf import Leaf, init, shardings, tree_bytes


def test_every_axis_has_a_name():
    with pytest.raises(ValueError, match="1 axis names for shape"):
        Leaf(shape=(2, 3), dtype=jnp.float32, axes=("slots",))


def test_bytes_of_a_tree_follow_its_dtypes():
    tree = {
        "a": Leaf(shape=(2, 3), dtype=jnp.uint16, axes=(None, None)),
        "b": (None, Leaf(shape=(), dtype=jnp.float32, axes=())),
    }
    assert tree_bytes(tree) == 12 + 4


def test_initial_values_fill_the_array():
    array = init(Leaf(shape=(3,), dtype=jnp.int32, axes=("slots",), fill=7))
    assert isinstance(array, jax.Array)
    assert array.tolist() == [7, 7, 7]


def test_an_axis_that_its_mesh_axis_does_not_divide_stays_whole():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
    declared = [Leaf(shape=(size,), dtype=jnp.float32, axes=("slots",)) for size in (3, 4)]
    three, four = shardings(declared, mesh, {"slots": "data"})
    assert three.spec == jax.sharding.PartitionSpec(None)
    assert four.spec == jax.sharding.PartitionSpec("data")
    arrays = init(declared, [three, four])
    assert [len(x.sharding.device_set) for x in arrays] == [2, 2]

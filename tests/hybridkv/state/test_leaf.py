import jax
import jax.numpy as jnp
import pytest

from hybridkv.state.leaf import Leaf, init, tree_bytes


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

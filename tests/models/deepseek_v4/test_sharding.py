"""Parameters are split along outputs, evenly, and a step on a mesh gives what one device gives."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from toy import TOY, empty_cache, toy_model, toy_options

from hybridkv.engine.steps import Steps
from hybridkv.state.batch import DecodeBatch
from models.deepseek_v4 import sharding
from models.deepseek_v4.model import DeepseekV4
from models.deepseek_v4.runtime import DeepseekV4Runtime


def abstract_mesh(**axes: int) -> jax.sharding.AbstractMesh:
    return jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes))


def abstract_model(config=TOY) -> DeepseekV4:
    return nnx.eval_shape(lambda: DeepseekV4(config, nnx.Rngs(0)))


def specs(model: DeepseekV4, mesh) -> dict[tuple[object, ...], tuple[object, ...]]:
    flat = nnx.to_flat_state(sharding.shardings(model, mesh))
    return {path: tuple(value.spec) for path, value in flat}


def test_every_rule_names_a_parameter():
    paths = [tuple(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(abstract_model()))]
    for end in sharding.AXES:
        assert any(path[-len(end) :] == end for path in paths), end


def test_every_matrix_is_split_and_never_along_its_inputs():
    model = abstract_model()
    split = specs(model, abstract_mesh(data=1, model=2))
    for path, parameter in nnx.to_flat_state(nnx.state(model)):
        names, spec = tuple(map(str, path)), split[path]
        assert len(spec) == parameter.ndim
        if names[-1] in ("weight", "up", "down", "o_a", "embed") and parameter.ndim > 1:
            assert "model" in spec, names
            assert spec[-1] is None, names
        else:
            assert set(spec) <= {None}, names


def test_leaves_stand_in_the_order_of_the_runtime():
    runtime = DeepseekV4Runtime(toy_model(TOY))
    leaves = jax.tree.leaves(sharding.shardings(abstract_model(), abstract_mesh(model=2)))
    assert len(leaves) == len(runtime.params)
    for leaf, parameter in zip(leaves, runtime.params, strict=True):
        assert len(leaf.spec) == parameter.ndim


def test_an_axis_that_does_not_divide_stays_whole():
    odd = dataclasses.replace(TOY, vocab_size=63)
    split = specs(abstract_model(odd), abstract_mesh(model=2))
    assert split[("head", "weight")] == (None, None)
    assert split[("embed",)] == (None, None)
    assert split[("blocks", 0, "attention", "q_b", "weight")] == ("model", None)


def test_a_mesh_with_an_expert_axis_spreads_experts():
    split = specs(abstract_model(), abstract_mesh(expert=2, model=2))
    assert split[("blocks", 0, "experts", "up")] == ("expert", "model", None)
    whole = specs(abstract_model(), abstract_mesh(data=2))
    assert set(whole[("blocks", 0, "experts", "up")]) == {None}


def test_spread_matrices_are_split_over_every_device_that_divides_them():
    model, mesh = abstract_model(), abstract_mesh(data=2, model=2)
    flat = nnx.to_flat_state(sharding.shardings(model, mesh, sharding.SPREAD_RULES))
    spread = {path: tuple(value.spec) for path, value in flat}
    whole = {path: value.shape for path, value in nnx.to_flat_state(nnx.state(model))}
    assert spread[("head", "weight")] == (("data", "model"), None)
    for path, spec in spread.items():
        for axes, size in zip(spec, whole[path], strict=True):
            assert axes in (None, ("data", "model")), path
            assert axes is None or size % 4 == 0
    odd = abstract_mesh(data=3, model=2)
    flat = nnx.to_flat_state(sharding.shardings(model, odd, sharding.SPREAD_RULES))
    assert dict(flat)[("head", "weight")].spec[0] is None


@pytest.mark.long
@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("axes", [(1, 2), (2, 1)])
def test_a_decode_step_on_two_devices_agrees_with_one(axes, told):
    runtime = DeepseekV4Runtime(toy_model(TOY))
    options = toy_options(sequential=False)
    cache = empty_cache(Steps(runtime, options), slots=2, tokens=64)
    batch = DecodeBatch(tokens=jnp.asarray([3, 5], jnp.int32), active=jnp.ones((2,), bool))

    def step(params, batch, cache):
        return runtime.decode_step(params, batch, cache, options)[0]

    alone = np.asarray(jax.jit(step)(runtime.params, batch, cache))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]).reshape(axes), ("data", "model"))
    places = jax.tree.leaves(sharding.shardings(abstract_model(), mesh))
    params = [jax.device_put(x, place) for x, place in zip(runtime.params, places, strict=True)]
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    batch, cache = jax.device_put((batch, cache), everywhere)
    with jax.set_mesh(mesh) if told else contextlib.nullcontext():
        shared = np.asarray(jax.jit(step)(params, batch, cache))
    # Untold, sums of norms are split too; told, only the products' shapes differ.
    np.testing.assert_allclose(shared, alone, rtol=1e-5, atol=1e-5)

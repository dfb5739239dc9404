"""``FunctionModel``: which logits it gives, and what it refuses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybridkv.engine.functional import FunctionModel
from hybridkv.engine.steps import Steps, prompt_tiles
from hybridkv.errors import UserError
from hybridkv.geometry import Geometry, LayerGeometry
from hybridkv.state.batch import DecodeBatch, StepOptions
from hybridkv.state.cache import Cache, assign_in_order
from hybridkv.state.capacity import Capacity

GEOMETRY = Geometry(
    layers=(LayerGeometry(window=3), LayerGeometry(ratio=1)), row_width=8, cells_per_block=4
)
PARAMS = {"embed": np.random.default_rng(0).normal(size=(10, 4)).astype(np.float32)}
OPTIONS = StepOptions(tile=8, key_block=4, sequential=True)


def forward(params, tokens, positions, attend):
    x = params["embed"][tokens]
    for layer in range(2):
        heads = x[:, :, None, :]
        x = x + attend(layer, heads, heads, heads)[:, :, 0, :]
    return x


def logits(params, hidden):
    return hidden @ params["embed"].T


def make(**changes):
    given = {"params": PARAMS, "forward": forward, "logits": logits}
    sizes = {"geometry": GEOMETRY, "vocab_size": 10}
    return FunctionModel(**(sizes | given | changes))


def run(model, ids, *, options=OPTIONS, decode=()):
    """Logits of the prompt's last tile, and of what is decoded in the second of two slots."""
    capacity = Capacity.for_tokens(GEOMETRY, tokens=24, slots=2)
    steps = Steps(model, options)
    cache = assign_in_order(Cache.init(GEOMETRY, capacity))
    for batch in prompt_tiles(np.asarray(ids, np.int32), 1, options, slots=2):
        last, cache = steps.tile(batch, cache)
    after = []
    for token in decode:
        tokens = jax.device_put(np.array([0, token], np.int32))
        batch = DecodeBatch(tokens=tokens, active=jax.device_put(np.array([False, True])))
        got, cache = steps.decode(batch, cache)
        after.append(np.asarray(got)[1])
    return np.asarray(last), after


def test_a_tile_gives_the_last_tokens_logits_or_all():
    ids = np.arange(13) % 10
    every = run(make(), ids, options=dataclasses.replace(OPTIONS, all_logits=True))[0]
    last = run(make(), ids)[0]
    assert (every.shape, last.shape) == ((1, 8, 10), (1, 10))
    np.testing.assert_allclose(last[0], every[0, 4], rtol=1e-6)


def test_decoding_continues_a_prompt():
    ids = np.arange(13) % 10
    expected = run(make(), ids)[0]
    _, after = run(make(), ids[:11], decode=ids[11:])
    np.testing.assert_allclose(after[-1], expected[0], rtol=1e-5)


def test_idle_lanes_come_out_as_zeros_when_lanes_run_in_turn():
    got = run(make(), np.arange(7), options=dataclasses.replace(OPTIONS, lanes=2))[0]
    np.testing.assert_array_equal(got[0], run(make(), np.arange(7))[0][0])
    assert (got[1] == 0.0).all()


def test_logits_of_a_half_precision_model_are_float32():
    half = make(params=jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), PARAMS))
    assert run(half, np.arange(7))[0].dtype == np.float32


def test_params_are_a_flat_list_of_the_given_arrays():
    model = make(params={"b": PARAMS["embed"], "a": {"c": np.ones(2, np.float32)}})
    assert [x.shape for x in model.params] == [(2,), (10, 4)]


def one_layer(params, tokens, positions, attend):
    x = params["embed"][tokens][:, :, None, :]
    return attend(0, x, x, x)[:, :, 0, :]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"forward": lambda *given: forward(*given)[:, -1]}, r"hidden states \[1, 8, hidden\]"),
        ({"forward": one_layer}, r"layers \[1\] of the geometry did not call attend"),
        ({"vocab_size": 11}, r"must be \[1, 11\]; got \[1, 10\]"),
        ({"vocab_size": 0}, "vocab_size must be at least 1"),
        (
            {"geometry": dataclasses.replace(GEOMETRY, layers=(LayerGeometry(ratio=4),))},
            "layer 0 .* needs its own step",
        ),
        (
            {"geometry": dataclasses.replace(GEOMETRY, layers=(LayerGeometry(window=4),))},
            "no layer stores rows",
        ),
    ],
)
def test_functions_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        run(make(**changes), np.arange(7))

"""Packed rows that fill a TPU's lanes: the bits of those that do not, and another identity."""

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from toy import decode, empty_cache, prefill, prompt, toy_model, toy_options

from hybridkv.prefixes.identity import Identity
from models.deepseek_v4.cache_formats import CACHE_FORMATS
from models.deepseek_v4.config import SPARSE
from models.deepseek_v4.runtime import DeepseekV4Runtime
from models.deepseek_v4.toy import WIDE_TOY

TILE = 16
QUICK = {"xla_backend_optimization_level": 0}
"""Compiling is most of the time."""
ROUTED = dataclasses.replace(
    WIDE_TOY, layer_kinds=(SPARSE,), layer_ratios=(4,), hash_layers=(False,), sinkhorn_steps=1
)
"""One layer, which has rows of all three sorts."""


def run(model, name):
    """Logits of a prompt and of tokens after it, and the cache at the end."""
    runtime = DeepseekV4Runtime(model, format=CACHE_FORMATS[name])
    options = toy_options(tile=TILE)

    def compiled(step):
        return jax.jit(lambda *a: step(runtime.params, *a, options), compiler_options=QUICK)

    steps = SimpleNamespace(
        model=runtime,
        options=options,
        tile=compiled(runtime.tile_step),
        decode=compiled(runtime.decode_step),
    )
    logits, cache = prefill(steps, empty_cache(steps), prompt(4 * TILE + 5))
    after, cache = decode(steps, cache, prompt(6, seed=1))
    return np.concatenate([logits, after]).view(np.uint32), cache


def test_logits_are_those_of_the_release_bit_for_bit():
    model = toy_model(ROUTED)
    expected, plain = run(model, "release")
    got, padded = run(model, "release_lanes")
    np.testing.assert_array_equal(got, expected)
    for kind in ("compressed", "indexer"):
        rows = (getattr(cache, kind).layers[0] for cache in (plain, padded))
        own, wide = (np.asarray(x) for x in rows)
        assert wide.shape[-1] % 128 == 0
        np.testing.assert_array_equal(wide[..., : own.shape[-1]], own)
        assert not wide[..., own.shape[-1] :].any()


@pytest.mark.parametrize("name", ["release", "fp8_index"])
def test_what_one_stored_is_a_miss_for_the_other(name):
    plain, padded = (
        Identity.of_geometry(
            WIDE_TOY.geometry(
                window_format=chosen.window, row_format=chosen.rows, index_format=chosen.index
            ),
            weights="w",
            numerics="n",
        )
        for chosen in (CACHE_FORMATS[name], CACHE_FORMATS[f"{name}_lanes"])
    )
    assert set(plain.differences(padded)) == {"geometry", "layout"}

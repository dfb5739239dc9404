"""The hybrid model on GenericCache: the same function, exact in its own right, no snapshot."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import compilations
from exactness import check_idle_slot, check_neighbours, check_stored_rows, run, shuffled
from flax import nnx
from toy import TOY, decode, digest, empty_cache, prefill, prompt, toy_model, toy_options

from hybridkv.engine.generate import Generator
from hybridkv.engine.numerics import identify
from hybridkv.engine.runner import Runner, RunnerOptions
from hybridkv.engine.steps import Steps, prompt_tiles
from hybridkv.prefixes.plan import Miss, Outcome
from hybridkv.state.batch import DecodeBatch, StepOptions
from hybridkv.state.cache import Cache
from hybridkv.state.capacity import Capacity
from hybridkv.state.generic import raw_fields
from models.deepseek_v4.checkpoint import load_model
from models.deepseek_v4.config import HEAVY, SLIDING, SPARSE
from models.deepseek_v4.parallel import parallel_forward
from models.deepseek_v4.runtime import DeepseekV4GenericRuntime, DeepseekV4Runtime

IDS = prompt(75)
NEW = prompt(40, seed=1)
ALL = np.concatenate([IDS, NEW])
CLOSE = 2e-5


def generic_steps(config=TOY, *, block: int = 16, **changes) -> Steps:
    runtime = DeepseekV4GenericRuntime(toy_model(config), block_tokens=block)
    return Steps(runtime, toy_options(**changes))


@pytest.fixture(scope="module")
def steps():
    return generic_steps()


@pytest.fixture(scope="module")
def hybrid():
    """Logits of all tokens by the hybrid cache's tile step."""
    steps = Steps(DeepseekV4Runtime(toy_model()), toy_options())
    return prefill(steps, empty_cache(steps), ALL)[0]


@pytest.fixture(scope="module")
def reference(steps):
    return run(steps, empty_cache(steps), IDS, NEW)


@pytest.fixture(scope="module")
def decoded(steps):
    """Logits after each token of NEW."""
    _, cache = prefill(steps, empty_cache(steps), IDS)
    return decode(steps, cache, NEW)[0]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 75, 115])
def test_prompts_have_the_hybrid_caches_logits(steps, hybrid, length):
    logits, _ = prefill(steps, empty_cache(steps), ALL[:length])
    np.testing.assert_allclose(logits, hybrid[:length], atol=CLOSE)


@pytest.mark.parametrize("start", [0, 1, 3, 4, 7, 8, 9, 15, 16, 17, 31, 33, 63])
def test_decoded_tokens_have_the_hybrid_caches_logits(steps, hybrid, start):
    cache = empty_cache(steps)
    if start:
        _, cache = prefill(steps, cache, ALL[:start])
    end = len(ALL) if start == 0 else start + 24
    logits, _ = decode(steps, cache, ALL[start:end])
    np.testing.assert_allclose(logits, hybrid[start:end], atol=CLOSE)


def test_blocks_and_tiles_that_divide_no_ratio_and_no_window(hybrid):
    steps = generic_steps(block=5, tile=10)
    logits, _ = prefill(steps, empty_cache(steps), ALL)
    np.testing.assert_allclose(logits, hybrid, atol=CLOSE)
    _, cache = prefill(steps, empty_cache(steps), ALL[:63])
    logits, _ = decode(steps, cache, ALL[63:])
    np.testing.assert_allclose(logits, hybrid[63:], atol=CLOSE)


CASES = {
    "windows only": {"layer_kinds": (SLIDING,) * 2, "layer_ratios": (0, 0), "window": 5},
    "ratios without a common factor, window wider than a tile, one pick": {
        "layer_kinds": (SPARSE, HEAVY),
        "layer_ratios": (3, 7),
        "window": 33,
        "index_topk": 1,
    },
    "window of one token, one row a token, a ratio wider than a tile": {
        "layer_kinds": (HEAVY, SPARSE, HEAVY),
        "layer_ratios": (1, 4, 21),
        "window": 1,
    },
}


@pytest.mark.parametrize("case", CASES, ids=[name.replace(" ", "_") for name in CASES])
def test_ratios_and_windows_are_data(case):
    changes = CASES[case]
    hashed = (False,) * len(changes["layer_kinds"])
    config = dataclasses.replace(TOY, hash_layers=hashed, **changes)
    graph, state = nnx.split(toy_model(config))
    forward = jax.jit(lambda s, t: parallel_forward(nnx.merge(graph, s), t)[0])
    whole = np.asarray(forward(state, jnp.asarray(ALL[None, :90])))[0]
    steps = generic_steps(config, tile=16)
    start, cache = prefill(steps, empty_cache(steps), ALL[:65])
    after, _ = decode(steps, cache, ALL[65:90])
    np.testing.assert_allclose(np.concatenate([start, after]), whole, atol=CLOSE)


def test_the_outside_oracles_logits(oracles):
    folder = oracles / "tiny_a"
    with np.load(folder / "oracle.npz") as oracle:
        given = {name: oracle[name] for name in oracle}
    options = StepOptions(tile=48, sequential=True, all_logits=True)
    steps = Steps(DeepseekV4GenericRuntime(load_model(folder), block_tokens=16), options)
    ids = given["input_ids"][0].astype(np.int32)
    tokens = len(given["full_ids"][0])
    logits, cache = prefill(steps, empty_cache(steps, tokens=tokens), ids)
    np.testing.assert_allclose(logits, given["prefill_logits"], atol=1e-4, rtol=0)
    after, _ = decode(steps, cache, given["greedy_tokens"].astype(np.int32))
    np.testing.assert_allclose(after, given["decode_logits"], atol=1e-4, rtol=0)


def test_a_bfloat16_model_has_the_hybrid_caches_logits():
    """float32 rows hold its bfloat16 ones as they are, and its float32 compressor inputs."""
    model = toy_model(dataclasses.replace(TOY, dtype="bfloat16"))
    both = []
    for runtime in (DeepseekV4Runtime(model), DeepseekV4GenericRuntime(model)):
        steps = Steps(runtime, toy_options())
        both.append(prefill(steps, empty_cache(steps), IDS)[0])
    np.testing.assert_allclose(both[0], both[1], atol=2e-2)


def test_capacity_changes_no_bit(steps, reference):
    assert run(steps, empty_cache(steps, tokens=2048), IDS, NEW) == reference


def test_order_of_blocks_changes_no_bit(steps, reference):
    cache = shuffled(empty_cache(steps, tokens=160))
    assert run(steps, cache, IDS, NEW) == reference


def _poison(cache: Cache, length: int) -> Cache:
    """NaN in every row past ``length`` and in every field that a layer lacks; blocks in order."""
    hybrid = TOY.geometry()
    layers = []
    for number in range(TOY.layers):
        own = cache.layer(number)
        flat = own.rows.reshape(-1, own.rows.shape[-1])
        used = jnp.arange(flat.shape[0])[:, None] < length
        there = jnp.arange(flat.shape[1])[None, :] < raw_fields(hybrid, number).width
        rows = jnp.where(used & there, flat, jnp.nan).reshape(own.rows.shape)
        layers.append(dataclasses.replace(own, rows=rows))
    return cache.with_layers(tuple(layers), cache.lengths)


def test_nan_in_every_unused_byte_changes_no_bit(steps, reference):
    cache, parts = empty_cache(steps, tokens=160), []
    for batch in prompt_tiles(IDS, 0, steps.options, 1):
        logits, cache = steps.tile(batch, _poison(cache, int(batch.starts[0])))
        parts.append(np.asarray(logits[0]))
    assert digest(np.concatenate(parts)[: len(IDS)]) == reference[0]
    rows = []
    for i, token in enumerate(NEW):
        row, cache = decode(steps, _poison(cache, len(IDS) + i), np.asarray([token]))
        rows.append(row[0])
    assert digest(np.stack(rows)) == reference[1]


def test_a_poisoned_row_that_is_used_would_be_seen(steps):
    """So that the test above can fail: one row inside the length."""
    _, cache = prefill(steps, empty_cache(steps), IDS)
    row, _ = decode(steps, _poison(cache, len(IDS) - 1), NEW[:1])
    assert np.isnan(row).any()


@pytest.mark.parametrize("end", [1, 3, 4, 15, 16, 17, 31, 32, 33, 64, 74])
def test_where_a_prompt_ends_changes_no_earlier_bit(steps, reference, end):
    """Cut anywhere, and gone on from the tile boundary below with what was written."""
    logits, cache = prefill(steps, empty_cache(steps), IDS[:end])
    start = end // steps.options.tile * steps.options.tile
    parts = [logits[:start]]
    for batch in prompt_tiles(IDS, 0, steps.options, 1, start=start, write_from=start):
        out, cache = steps.tile(batch, cache)
        parts.append(np.asarray(out[0]))
    whole = np.concatenate(parts)[: len(IDS)]
    assert digest(whole) == reference[0]
    assert digest(logits) == digest(whole[:end])


@pytest.mark.parametrize("stored", [0, 1, 16, 31, 32, 40, 75])
def test_rows_that_are_stored_already_are_never_written(steps, stored):
    check_stored_rows(steps, IDS, stored, TOY.vocab_size)


@pytest.mark.parametrize("back", [1, 3, 4, 5, 9, 17, 40])
def test_a_sequence_goes_back_to_any_token_by_its_length(steps, decoded, back):
    """Tokens decoded and taken back leave no trace, inside a cell and over window and blocks."""
    _, cache = prefill(steps, empty_cache(steps), IDS)
    kept = len(NEW) - back
    _, cache = decode(steps, cache, np.concatenate([NEW[:kept], (NEW[kept:] + 1) % TOY.vocab_size]))
    cache = dataclasses.replace(cache, lengths=cache.lengths - back)
    again, _ = decode(steps, cache, NEW[kept:])
    assert digest(again) == digest(decoded[kept:])


@pytest.mark.parametrize("sequential", [True, False], ids=["sequential", "batched"])
def test_lane_and_neighbours_change_no_bit(sequential):
    check_neighbours(generic_steps(lanes=3, sequential=sequential), IDS, NEW[:20])


def test_idle_slots_keep_every_byte(steps):
    check_idle_slot(steps, IDS, NEW)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="how XLA's CPU compiler fuses")
def test_a_decode_step_copies_no_pool(steps):
    """A plain read of the window made three copies of every pool: 148 ms of a step, not 2."""
    cache = empty_cache(steps, tokens=4096)
    batch = DecodeBatch(tokens=jnp.zeros((1,), jnp.int32), active=jnp.ones((1,), bool))
    step = jax.jit(
        lambda params, cache: steps.model.decode_step(params, batch, cache, steps.options),
        donate_argnames="cache",
    )
    text = step.lower(steps.model.params, cache).compile().as_text()
    form = "f32[{},{},{}]".format(*cache.compressed.layers[0].shape)
    made = [line for line in text.splitlines() if f"= {form}" in line]
    assert made
    assert [line for line in made if " copy(" in line] == []


TILE = 16


@pytest.fixture(scope="module")
def runner():
    """Blocks of 8 tokens, tiles of 16, and not one snapshot."""
    model = DeepseekV4GenericRuntime(toy_model(), block_tokens=8)
    options = toy_options(tile=TILE)
    capacity = Capacity(blocks=160, slots=2, blocks_per_sequence=28)
    sizes = RunnerOptions(capacity=capacity, snapshots=0, debug=True)
    return Runner(model, options, sizes, identity=identify(model, options))


def serve(runner, ids, namespace):
    """One prompt and six tokens after it: its sequence, its logits, the logits after each."""
    sequence = runner.start(ids, max_new_tokens=6, namespace=namespace)
    logits = runner.prefill(sequence)
    after = [runner.decode({sequence: int(token)})[sequence] for token in NEW[:6]]
    runner.finish(sequence)
    return sequence, logits, np.stack(after)


@pytest.mark.parametrize("common", [16, 17, 31, 32, 48, 63, 64, 96])
def test_warm_is_cold_and_every_whole_tile_is_reused(runner, common):
    ids = np.concatenate([prompt(common, seed=4), prompt(21, seed=common)])
    cold = serve(runner, ids, f"cold {common}")
    assert isinstance(cold[0].plan, Miss)
    other = np.concatenate([prompt(common, seed=4), (ids[common : common + 1] + 1) % 64])
    serve(runner, other, f"warm {common}")
    warm = serve(runner, ids, f"warm {common}")
    start = common // TILE * TILE
    assert (warm[0].plan.outcome, warm[0].start, warm[0].exact_from) == (
        Outcome.REUSE,
        start,
        start,
    )
    assert warm[0].plan.snapshot < 0
    assert not warm[0].snapshots_at
    assert digest(warm[1]) == digest(cold[1][start:])
    assert digest(warm[2]) == digest(cold[2])


def test_an_exact_repetition_reuses_all_but_the_last_tile(runner):
    ids = prompt(96, seed=5)
    cold = serve(runner, ids, "again")
    warm = serve(runner, ids, "again")
    assert warm[0].start == 80
    assert digest(warm[1]) == digest(cold[1][80:])


def test_nothing_compiles_after_warm_up(runner):
    head = prompt(96, seed=6)
    with compilations() as compiled:
        for seed in range(4):
            serve(runner, np.concatenate([head, prompt(10 + seed, seed=seed)]), "compile")
        runner.allocator.evict(blocks=4)
    assert compiled == []


def test_the_generator_takes_it_unchanged(steps):
    """Its greedy tokens are those of the steps by hand."""
    generator = Generator(steps.model, toy_options(), capacity_tokens=128)
    tokens = list(generator.stream(IDS, max_new_tokens=30))
    logits, cache = prefill(steps, empty_cache(steps), IDS)
    after, _ = decode(steps, cache, np.asarray(tokens[:-1]))
    assert tokens == [int(logits[-1].argmax()), *after.argmax(axis=1).tolist()]

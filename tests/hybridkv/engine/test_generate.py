"""One sequence after the other over one cache, with the TOY model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import compilations
from toy import empty_cache, prompt, toy_options, toy_runtime

from hybridkv.engine.generate import GenerationStats, Generator, default_options
from hybridkv.engine.sampling import SamplingOptions
from hybridkv.engine.steps import prompt_tiles
from hybridkv.errors import UserError

CAPACITY = 512
HOT = SamplingOptions(temperature=1.0, top_p=0.95, seed=3)


@pytest.fixture(scope="module")
def warm():
    """A generator, and the tokens of its very first stream with what that compiled."""
    generator = Generator(
        toy_runtime(), toy_options(all_logits=False), capacity_tokens=CAPACITY - 20
    )
    with compilations() as compiled:
        tokens = list(generator.stream(prompt(37), max_new_tokens=400))
    return generator, tokens, len(compiled)


@pytest.fixture
def generator(warm):
    return warm[0]


def test_nothing_is_compiled_after_warm_up(warm):
    """400 tokens pass every cell, window, block and tile boundary many times over."""
    _, tokens, compiled = warm
    assert len(tokens) == 400
    assert compiled == 0


def test_a_new_shape_would_have_been_counted():
    with compilations() as compiled:
        jax.jit(lambda x: x * 3)(np.ones(977, np.float32)).block_until_ready()
    assert len(compiled) == 1


def test_other_lengths_and_sampling_compile_nothing_either(generator):
    with compilations() as compiled:
        for length, sampling in ((1, SamplingOptions()), (32, HOT), (33, HOT), (90, HOT)):
            list(generator.stream(prompt(length), max_new_tokens=9, sampling=sampling))
    assert len(compiled) == 0


def test_no_state_leaks_from_one_prompt_to_the_next(warm):
    generator, tokens, _ = warm
    assert len(set(tokens)) > 5
    for length in (5, 100, 61):
        other = list(generator.stream(prompt(length, seed=length), max_new_tokens=7, sampling=HOT))
        assert len(other) == 7
        assert list(generator.stream(prompt(37), max_new_tokens=60)) == tokens[:60]


def test_a_stream_that_is_left_early_leaves_nothing_behind(warm):
    generator, tokens, _ = warm
    stream = generator.stream(prompt(80, seed=9), max_new_tokens=50)
    for _ in range(5):
        next(stream)
    stream.close()
    assert list(generator.stream(prompt(37), max_new_tokens=20)) == tokens[:20]


def test_sampling_is_repeatable_and_depends_on_the_seed(generator):
    def tokens(seed: int) -> list[int]:
        options = SamplingOptions(temperature=1.0, seed=seed)
        return list(generator.stream(prompt(20), max_new_tokens=30, sampling=options))

    first = tokens(1)
    assert tokens(1) == first
    assert tokens(2) != first


def test_prompt_and_new_tokens_may_fill_the_cache_exactly(warm):
    generator, tokens, _ = warm
    assert generator.capacity_tokens == CAPACITY  # rounded up to whole tiles
    for length in (CAPACITY - 1, CAPACITY - 3, 480, 37):
        given = prompt(length, seed=4)
        full = list(generator.stream(given, max_new_tokens=CAPACITY - length))
        assert len(full) == CAPACITY - length
        short = list(generator.stream(given, max_new_tokens=min(3, len(full))))
        assert full[: len(short)] == short
    assert list(generator.stream(prompt(37), max_new_tokens=5)) == tokens[:5]


@pytest.mark.parametrize(
    ("ids", "new", "message"),
    [
        (np.zeros(0, np.int32), 1, "the prompt is empty: give at least one token"),
        (np.array([1.0, 2.0]), 1, r"integer array, got float64 \[2\]: pass np.asarray"),
        (np.array([[1, 2]]), 1, r"one-dimensional integer array, got int64 \[1, 2\]"),
        (np.array(3), 1, "one-dimensional integer array"),
        (np.array([True, False]), 1, "integer array, got bool"),
        (np.array([0, 64]), 1, "token id 64 is outside the vocabulary: ids are 0 to 63"),
        (np.array([5, -1, 70]), 1, "token id -1 is outside the vocabulary"),
        (np.array([5, 2**40]), 1, f"token id {2**40} is outside the vocabulary"),
        (np.array([1]), 0, "max_new_tokens must be at least 1, got 0"),
        (np.array([1]), -4, "max_new_tokens must be at least 1, got -4"),
        (np.zeros(500, int), 13, "500 prompt tokens and 13 new ones need 513 tokens.* is 512"),
        (np.zeros(512, int), 1, "need 513 tokens of cache"),
    ],
)
def test_bad_input_is_refused_in_one_line_before_any_work(generator, ids, new, message):
    with pytest.raises(UserError, match=message) as error:
        next(generator.stream(ids, max_new_tokens=new))
    assert "\n" not in str(error.value)


MASKED = np.array([1, 1, 1, 0, 0])


def test_padding_on_the_right_is_dropped_by_the_mask(generator):
    ids = prompt(5)
    for mask in (MASKED, MASKED.astype(bool)):
        stats = GenerationStats(prompt_tokens=0)
        got = list(generator.stream(ids, max_new_tokens=6, mask=mask, stats=stats))
        assert got == list(generator.stream(ids[:3], max_new_tokens=6))
        assert stats.prompt_tokens == 3


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (MASKED[::-1], "the prompt is padded on the left"),
        (np.array([1, 0, 1, 1, 1]), "the prompt is padded on the left"),
        (np.zeros(5), "the prompt is empty"),
        (np.ones(4), r"the mask has shape \[4\], the prompt \[5\]"),
    ],
)
def test_other_masks_are_refused_in_one_line(generator, mask, message):
    with pytest.raises(UserError, match=message) as error:
        next(generator.stream(prompt(5), max_new_tokens=1, mask=mask))
    assert "\n" not in str(error.value)


def test_a_prompt_that_starts_with_the_padding_token_is_refused(generator, monkeypatch):
    monkeypatch.setattr(generator.steps.model, "pad_token", 9)
    with pytest.raises(UserError, match="padded on the left"):
        next(generator.stream(np.array([9, 9, 1]), max_new_tokens=1))
    assert len(list(generator.stream(np.array([1, 9, 9]), max_new_tokens=1))) == 1


def test_stats_tell_what_a_generation_cost(generator):
    stats = GenerationStats(prompt_tokens=0)
    geometry = generator.steps.model.geometry
    for count, _ in enumerate(
        generator.stream(prompt(30), max_new_tokens=25, stats=stats), start=1
    ):
        assert (stats.prompt_tokens, stats.new_tokens) == (30, count)
        sizes = {k.value: v for k, v in geometry.cache_bytes(30 + count).items()}
        assert stats.cache_bytes == sizes
    assert stats.time_to_first_token_s > 0
    assert stats.prefill_tokens_per_second == 30 / stats.time_to_first_token_s
    assert stats.decode_tokens_per_second == 24 / stats.decode_seconds


def test_stats_of_nothing_are_zero():
    stats = GenerationStats(prompt_tokens=9)
    assert stats.prefill_tokens_per_second == stats.decode_tokens_per_second == 0.0


def test_bytes_by_kind_are_those_of_the_allocated_cache(generator):
    sizes = generator.steps.model.geometry.cache_bytes(CAPACITY)
    assert generator.bytes_by_kind == {kind.value: size for kind, size in sizes.items()}


def test_first_tokens_are_the_likeliest_of_the_prompt(generator):
    """Against one tile step, called by hand."""
    ids = prompt(29, seed=8)
    cache = empty_cache(generator.steps, tokens=CAPACITY)
    (batch,) = prompt_tiles(ids, 0, generator.steps.options, 1)
    logits, _ = generator.steps.tile(batch, cache)
    assert next(generator.stream(ids, max_new_tokens=1)) == int(jnp.argmax(logits[0]))


@pytest.mark.parametrize(("at_least", "tile"), [(1, 16), (16, 16), (17, 32), (128, 128)])
def test_default_options_use_whole_blocks(generator, at_least, tile):
    options = default_options(generator.steps.model, tile_at_least=at_least)
    assert options.tile == tile
    assert options.sequential
    assert options.lanes == 1

"""Many requests over one model: each gives what it gives alone, and nothing is left behind."""

import collections
import dataclasses

import jax
import numpy as np
import pytest
from engines import (
    BLOCKS,
    SLOTS,
    TILE,
    VOCAB,
    FaultyLetters,
    Letters,
    ids_of,
    same,
    task_of,
    words,
)

from hybridkv.blocks.pools import NeverFits
from hybridkv.engine.probe import Probe
from hybridkv.engine.requests import Finish, Request
from hybridkv.engine.sampling import SamplingOptions
from hybridkv.engine.scheduler import SchedulerOptions, Stage
from hybridkv.errors import UserError
from hybridkv.state import leaf

WILD = SamplingOptions(temperature=1.5, top_p=0.9, seed=7)


def joined(*parts):
    return np.concatenate(parts)


def mixed(count):
    """Prompts of many lengths, some with a common beginning; greedy, drawn and penalised."""
    rng = np.random.default_rng(5)
    heads = [ids_of(70, seed=100 + i) for i in range(3)]
    samplings = [None, WILD, SamplingOptions(repetition_penalty=1.3), dataclasses.replace(WILD)]
    for number in range(count):
        own = ids_of(int(rng.integers(1, 60)), seed=number)
        ids = own if number % 3 == 0 else joined(heads[number % 2][: rng.integers(1, 71)], own)
        yield ids, int(rng.integers(1, 24)), samplings[number % 4]


@pytest.mark.parametrize("budget", [0, 4 * TILE])
def test_many_requests_together_give_what_each_gives_alone(lab, budget):
    wanted = [(ids, new, how, lab.alone(ids, new, how)) for ids, new, how in mixed(16)]
    lab.change(scheduler=SchedulerOptions(token_budget=budget))
    refused, evicted = collections.Counter(), []
    lab.engine.runner.allocator.on_evict.append(lambda ids, tier, cause: evicted.extend(ids))
    handles = []
    for number, (ids, new, how, _) in enumerate(wanted):
        handles.append(lab.submit(ids, new, sampling=how or SamplingOptions()))
        if number > 6:
            lab.steps(3)  # the later ones come while the earlier ones run
        refused[task_of(handles[0]).stage] += 1
    for _ in range(1000):
        free = lab.engine.runner.free_slots
        waits = [t for t in lab.engine._tasks.values() if t.stage is Stage.WAITING]
        refused["room"] += bool(free and any(t.refused_at >= 0 for t in waits))
        lab.engine.step()
        lab.time.now += 0.01
        if not lab.engine.waiting:
            break
    assert all(
        same(handle.output, alone) for handle, (_, _, _, alone) in zip(handles, wanted, strict=True)
    )
    assert all(handle.output.exact for handle in handles)
    assert evicted
    assert refused["room"]
    lab.engine.drain()
    assert not lab.engine._idle.pending


def test_what_is_counted_is_what_was_done(lab):
    """Every prompt token was reused or computed; replayed ones were computed besides."""
    handles = [lab.submit(ids, new) for ids, new, _ in mixed(9)]
    lab.finish(*handles)
    counters, outputs = lab.engine.counters, [handle.output for handle in handles]
    assert counters.submitted == counters.ended[Finish.LENGTH] == 9
    assert counters.new_tokens == sum(len(o.tokens) for o in outputs)
    assert counters.computed_tokens == sum(o.computed for o in outputs)
    assert counters.reused_tokens == sum(o.reused for o in outputs)
    for output in outputs:
        assert output.reused + output.computed == output.prompt_tokens
    assert counters.preemptions == counters.compilations == 0


def test_nothing_to_run_is_nothing(lab):
    assert lab.engine.run([]) == []
    assert lab.engine.step() is False
    lab.engine.drain()
    assert lab.engine.counters.turns == 0


def test_progress_is_told_of_each_output_once(lab):
    seen = []
    requests = [Request(prompt=ids_of(20, i), max_new_tokens=2 + i, samples=2) for i in range(3)]
    outputs = lab.engine.run(requests, progress=seen.append)
    assert len(outputs) == 6
    assert sorted(map(id, seen)) == sorted(map(id, outputs))
    assert all(output.finish is Finish.LENGTH for output in seen)


# Refusals.


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
        {"seed": -1},
        {"seed": 2**32},
        {"seed": 0.5},
        {"temperature": "1"},
        {"top_k": True},
    ],
    ids=str,
)
def test_sampling_out_of_range_is_refused(values):
    with pytest.raises(UserError, match=f"{next(iter(values))} must be"):
        SamplingOptions(**values)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"samples": 0}, "samples must be at least 1"),
        ({"logprobs": -1}, "logprobs must be at least 0"),
        ({"logprobs": 99}, "the engine was made for 4"),
        ({"timeout_s": 0.0}, "timeout_s must be above 0"),
        ({"timeout_s": float("nan")}, "timeout_s must be above 0"),
        ({"max_new_tokens": 8.0}, "max_new_tokens must be a whole number"),
        ({"samples": True}, "samples must be a whole number"),
        ({"priority": None}, "priority must be a whole number"),
        ({"logprobs": "1"}, "logprobs must be a whole number, or None"),
        ({"timeout_s": "5"}, "timeout_s must be a number, or None"),
        ({"policy": 5}, "policy must be a SnapshotPolicy, or None"),
        ({"publish": "none"}, "publish must be a Publish, or None"),
        ({"sampling": {}}, "sampling must be SamplingOptions"),
        ({"namespace": None}, "namespace must be a string"),
        ({"stop": None}, "stop must be a tuple of strings"),
        ({"stop_tokens": ("a",)}, "stop_tokens must be a tuple of token ids"),
        ({"stop": "abc"}, "stop is a tuple of strings"),
        ({"stop": ("",)}, "stop string is empty"),
        ({"stop": ("abc",)}, "stop strings need a tokenizer"),
        ({"stop_tokens": (-1,)}, "stop token"),
        ({"prompt": "text"}, "the engine has no tokenizer"),
        ({"prompt": np.empty(0, np.int32)}, "prompt"),
        ({"prompt": [1, VOCAB]}, "vocab"),
        ({"prompt": [1.5]}, "integer"),
    ],
    ids=str,
)
def test_a_request_that_means_nothing_is_refused_and_nothing_is_taken(lab, values, says):
    with pytest.raises(UserError, match=says):
        lab.engine.submit(Request(**{"prompt": [1, 2, 3], "max_new_tokens": 4} | values))
    assert lab.engine.waiting == lab.engine.counters.submitted == 0


def test_a_request_that_can_never_fit_is_refused_with_the_numbers(lab):
    with pytest.raises(UserError, match="need 200 tokens of cache; the capacity is 192"):
        lab.submit(ids_of(190), 10)
    lab.submit(ids_of(180), 12)
    lab.engine.reset()


def test_a_request_larger_than_the_pool_is_refused_with_the_numbers(lab, monkeypatch):
    sizes = lab.engine.runner.sizes
    capacity = dataclasses.replace(sizes.capacity, blocks=10)
    monkeypatch.setattr(lab.engine.runner, "sizes", dataclasses.replace(sizes, capacity=capacity))
    with pytest.raises(NeverFits, match="11 blocks never fit DEVICE, which has 10"):
        lab.submit(ids_of(160), 1)
    assert not lab.engine.waiting


def test_a_batch_with_one_bad_request_leaves_nothing(lab):
    good = Request(prompt=ids_of(40), max_new_tokens=3)
    with pytest.raises(UserError):
        lab.engine.run([good, good, Request(prompt=ids_of(190), max_new_tokens=10), good])
    assert lab.engine.waiting == 0
    assert lab.engine.counters.new_tokens == 0


def test_a_batch_whose_iterable_or_tokenizer_fails_leaves_nothing(lab):
    def requests():
        yield Request(prompt=ids_of(40), max_new_tokens=3)
        raise OSError("the file ended")

    with pytest.raises(OSError, match="the file ended"):
        lab.engine.run(requests())
    assert lab.engine.waiting == 0

    class Broken(Letters):
        def encode(self, text):
            raise ValueError("not a letter")

    lab.change(text=Broken())
    with pytest.raises(ValueError, match="not a letter"):
        lab.engine.run([Request(prompt=ids_of(40), max_new_tokens=3), Request(prompt="?!")])
    assert lab.engine.waiting == 0


# Samples, stops, log-probabilities.


@pytest.mark.parametrize("length", [5, 70])
def test_samples_share_the_prompt_and_are_requests_with_later_seeds(lab, length):
    ids, seeds = ids_of(length), range(7, 11)
    alone = [lab.alone(ids, 12, dataclasses.replace(WILD, seed=seed)) for seed in seeds]
    assert len({tuple(output.tokens) for output in alone}) == 4
    handle = lab.submit(ids, 12, sampling=WILD, samples=4)
    lab.finish(handle)
    assert all(same(a, b) for a, b in zip(handle.outputs, alone, strict=True))
    rest = length - (length - 1) // TILE * TILE
    assert [output.computed for output in handle.outputs] == [length, rest, rest, rest]


def test_a_sample_past_the_largest_seed_goes_on_from_zero(lab):
    ids = ids_of(9)
    alone = lab.alone(ids, 8, dataclasses.replace(WILD, seed=0))
    last = dataclasses.replace(WILD, seed=2**32 - 1)
    handle = lab.submit(ids, 8, sampling=last, samples=2)
    lab.finish(handle)
    assert same(handle.outputs[1], alone)


def test_a_stop_string_over_several_tokens_ends_the_output_before_it(lab):
    ids = ids_of(30)
    alone = lab.alone(ids, 12)
    spelt = words(alone.tokens)
    lab.change(text=Letters())
    stop = spelt[5:8]
    at = spelt.find(stop)
    handle = lab.submit(ids, 12, stop=("never this", stop))
    pieces = list(handle.pieces())
    output = handle.output
    assert (output.finish, output.text) == (Finish.STOP, spelt[:at])
    assert output.tokens == alone.tokens[: at + 3]
    assert "".join(piece.text for piece in pieces) == spelt[:at]
    # What begins like a stop string and is none is shown at the end.
    missing = chr(ord("A") + VOCAB)
    handle = lab.submit(ids, 12, stop=(spelt[10:] + missing,))
    assert handle.result().text == spelt
    assert handle.output.finish is Finish.LENGTH
    assert handle.output.last_text == spelt[10:]


def test_text_goes_in_and_comes_out(lab):
    ids = ids_of(30)
    alone = lab.alone(ids, 5)
    lab.change(text=Letters())
    output = lab.engine.submit(Request(prompt=words(ids.tolist()), max_new_tokens=5)).result()
    assert same(output, alone)
    assert output.text == words(alone.tokens)


def test_a_stop_token_ends_the_output_and_is_its_last_token(lab):
    ids = ids_of(30)
    alone = lab.alone(ids, 12)
    token = alone.tokens[6]
    handle = lab.submit(ids, 12, stop_tokens=(token,))
    assert list(handle) == alone.tokens[: alone.tokens.index(token) + 1]
    assert handle.output.finish is Finish.STOP


def test_one_token_may_be_all(lab):
    for length in (1, TILE - 1, TILE, TILE + 1, 4 * TILE):
        ids = ids_of(length)
        alone = lab.alone(ids, 3)
        lab.engine.reset()
        for _ in range(2):
            output = lab.submit(ids, 1).result()
            assert (output.tokens, output.finish) == (alone.tokens[:1], Finish.LENGTH)
    assert lab.engine.counters.decode_steps == 0


def test_log_probabilities_are_those_of_the_logits(lab, monkeypatch):
    rows, choose = [], lab.engine._sampler.choose

    def watched(logits, which, positions):
        rows.append(np.asarray(logits)[[row for row, _ in which]].astype(np.float64))
        return choose(logits, which, positions)

    monkeypatch.setattr(lab.engine._sampler, "choose", watched)
    sampling = SamplingOptions(temperature=2.0, repetition_penalty=1.5, top_k=9)
    output = lab.submit(ids_of(30), 10, sampling=sampling, logprobs=4).result()
    assert len(rows) == len(output.pieces) == 10
    for (row,), piece in zip(rows, output.pieces, strict=True):
        expected = row - row.max() - np.log(np.exp(row - row.max()).sum())
        assert piece.logprob == pytest.approx(expected[piece.token], abs=1e-5)
        order = np.argsort(-row, kind="stable")[:4]
        assert [token for token, _ in piece.top] == order.tolist()
        np.testing.assert_allclose([p for _, p in piece.top], expected[order], atol=1e-5)


@pytest.mark.parametrize("asked", [None, 0, 2])
def test_as_many_likeliest_tokens_as_were_asked_for(lab, asked):
    piece = lab.submit(ids_of(8), 1, logprobs=asked).result().pieces[0]
    assert (piece.logprob is None) == (asked is None)
    assert len(piece.top) == (asked or 0)


# Faults of one request.


def test_a_tokenizer_that_fails_ends_only_its_request(lab):
    ids, other = ids_of(30), ids_of(31, seed=1)
    alone, neighbour = lab.alone(ids, 12), lab.alone(other, 12)
    bad = next(t for t in alone.tokens[2:] if t not in neighbour.tokens)
    lab.change(text=FaultyLetters(bad))
    handles = [lab.submit(ids, 12), lab.submit(other, 12)]
    lab.finish(*handles)
    failed = handles[0].output
    assert failed.finish is Finish.FAILED
    assert f"tokenizer failed on token {bad}" in failed.reason
    assert failed.tokens == alone.tokens[: alone.tokens.index(bad)]
    assert same(handles[1].output, neighbour)


@pytest.mark.parametrize("how", ["length", "cancelled", "reset"])
def test_a_tokenizer_that_fails_at_the_end_ends_only_its_request(lab, how):
    ids, other = ids_of(30), ids_of(31, seed=1)
    alone = lab.alone(other, 12)
    lab.change(text=FaultyLetters())
    handle = lab.submit(ids, 4)
    lab.change()
    neighbour = lab.submit(other, 12)
    if how == "length":
        lab.finish(handle)
    else:
        lab.steps(3)
        handle.cancel() if how == "cancelled" else lab.engine.reset()
    output = handle.output
    assert output.finish is (Finish.LENGTH if how == "length" else Finish.CANCELLED)
    assert "tokenizer failed" in output.reason
    assert lab.engine.counters.ended[output.finish] == 1 + (how == "reset")
    if how != "reset":
        lab.finish(neighbour)
        assert same(neighbour.output, alone)


@pytest.mark.parametrize("where", ["tiles", "advance"])
def test_logits_that_are_not_finite_fail_only_their_request(lab, monkeypatch, where):
    prompts = [ids_of(20, 0), ids_of(36, 1), ids_of(18, 2)]
    alone = [lab.alone(ids, 8) for ids in prompts]
    runner = lab.engine.runner
    compute = getattr(runner, where)
    handles = [lab.submit(ids, 8) for ids in prompts]
    poisoned = task_of(handles[1])

    def spoilt(sequences):
        logits = np.array(compute(sequences))
        for row, sequence in enumerate(sequences):
            if sequence is poisoned.sequence:
                at = row if where == "tiles" else sequence.slot
                if where == "tiles" or len(poisoned.output.pieces) == 3:
                    logits[at, 5] = np.nan
        return jax.device_put(logits, leaf.placement())

    monkeypatch.setattr(runner, where, spoilt)
    lab.finish(*handles)
    failed = handles[1].output
    assert failed.finish is Finish.FAILED
    assert "not finite" in failed.reason
    assert failed.tokens == ([] if where == "tiles" else alone[1].tokens[:3])
    assert same(handles[0].output, alone[0])
    assert same(handles[2].output, alone[2])
    monkeypatch.undo()
    again = lab.submit(prompts[1], 8).result()
    assert same(again, alone[1])
    if where == "tiles":
        assert again.reused == 0  # nothing of what failed is trusted


# Where lanes or neighbours change bits.


@pytest.mark.parametrize(("lanes", "neighbours"), [(True, False), (False, True), (False, False)])
def test_one_at_a_time_where_others_change_bits(lab, monkeypatch, lanes, neighbours):
    """Lanes are neighbours too: a tile step may have several only where both are exact."""
    probe = Probe(lanes_exact=lanes, neighbours_exact=neighbours, detail="a test's")
    prompts = [ids_of(40, i) for i in range(SLOTS)]
    alone = [lab.alone(ids, 6) for ids in prompts]
    monkeypatch.setattr(lab.engine, "probe", probe)
    runner, sizes = lab.engine.runner, []
    for name in ("tiles", "advance"):
        compute = getattr(runner, name)

        def counted(members, compute=compute, name=name):
            sizes.append((name, len(members)))
            return compute(members)

        monkeypatch.setattr(runner, name, counted)
    handles = [lab.submit(ids, 6) for ids in prompts]
    lab.finish(*handles)
    assert {size for name, size in sizes if name == "tiles"} == {1}
    decoded = {size for name, size in sizes if name == "advance"}
    assert decoded == {1} if not neighbours else max(decoded) > 1
    for handle, one in zip(handles, alone, strict=True):
        assert same(handle.output, one)


def test_lanes_and_slots_are_shared_where_they_change_no_bits(lab):
    assert lab.engine.probe is not None
    assert lab.engine.probe.exact
    handles = [lab.submit(ids_of(40, i), 6) for i in range(SLOTS)]
    lab.finish(*handles)
    # Three tiles each over two lanes: five steps at least, nine without sharing.
    assert lab.engine.counters.tile_steps == 6
    assert lab.engine.counters.decode_steps < 15


def test_what_came_first_is_forgotten_after_a_reset(lab):
    handle = lab.submit(ids_of(40), 8)
    lab.steps(4)
    lab.engine.reset()
    assert handle.output.finish is Finish.CANCELLED
    assert handle.result() is handle.output
    assert lab.submit(ids_of(40), 1).result().reused == 0
    assert lab.engine.runner.allocator.pools[0][0].capacity == BLOCKS


def test_an_empty_prompt_is_refused_for_being_empty(lab):
    with pytest.raises(UserError, match="empty"):
        lab.engine.submit(Request(prompt=[]))

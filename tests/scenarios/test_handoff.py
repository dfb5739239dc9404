"""A sequence goes from a prefill engine to a decode engine, whole, or it is refused."""

import dataclasses
import os
import sys

import jax
import numpy as np
import pytest
from engines import BLOCKS, SLOTS, ids_of, same, task_of
from places import REPOSITORY
from toy import TOY, digest

from hybridkv.blocks.entries import Form, Tier
from hybridkv.engine import parking
from hybridkv.engine.handoff import export_sequence, import_sequence
from hybridkv.engine.numerics import identify
from hybridkv.engine.requests import Finish, Request
from hybridkv.kinds import Kind
from hybridkv.state.logical import state_of
from hybridkv.tiers.handoff_record import HandOff, HandOffRefused
from scenarios.runs import assert_at_rest, used

sys.path.insert(0, str(REPOSITORY / "scripts"))

import verify_handoff

RATIO = 4
PICKED = TOY.index_topk * RATIO
"""Tokens from which on the indexer has to choose."""


def readdressed(handoff, runner):
    """As if its sender had been of the receiver's identity: two pools, one model and steps."""
    identity = runner.identity
    return dataclasses.replace(handoff, identity=identity, root=identity.root())


def exported(sender, ids, namespace=""):
    """A prompt as its prefill engine hands it off; nothing is left there."""
    sequence = sender.start(ids, namespace=namespace, max_new_tokens=1)
    sender.prefill(sequence)
    handoff = export_sequence(sender, sequence)
    sender.finish(sequence)
    return handoff


def decoded(receiver, handoff, tokens):
    """Digests of the logits after each token; the receiver holds nothing afterwards."""
    sequence = import_sequence(receiver, handoff, max_new_tokens=len(tokens))
    rows = [digest(receiver.decode({sequence: int(t)})[sequence]) for t in tokens]
    receiver.release(sequence)
    return rows


def with_kind(handoff, kind, array):
    """With other words of a kind, and their right digests: a sender that sends them."""
    made = {"block_checks", "state_checks"}
    parts = {
        field.name: getattr(handoff, field.name)
        for field in dataclasses.fields(handoff)
        if field.name not in made
    }
    name, spans = "blocks", handoff.block_spans
    if kind in handoff.state_spans:
        name, spans = "state", handoff.state_spans
    parts[name] = parts[name].copy()
    parts[name][..., spans[kind]] = array
    return HandOff.of(**parts)


@pytest.mark.parametrize("length", [PICKED // 2, 3 * PICKED], ids=["all picked", "some picked"])
def test_b012_index_rows_travel_and_are_asked_for_also_where_everything_is_picked(
    bench, lab, length
):
    ids, after = bench.ids(length), bench.ids(PICKED // 2)
    single = bench.cold(ids, after)
    expected = [digest(row) for row in single.after]
    handoff = readdressed(exported(lab.engine.runner, ids), bench.runner)
    assert decoded(bench.runner, handoff, after) == expected
    # Below, nobody would notice that they are missing; so it must not depend on noticing.
    empty = decoded(bench.runner, with_kind(handoff, Kind.INDEXER, 0), after)
    assert (empty == expected) == (length < PICKED)
    spans = {k: s for k, s in handoff.block_spans.items() if k is not Kind.INDEXER}
    forgot = HandOff.from_bytes(
        dataclasses.replace(
            handoff,
            block_spans=spans,
            blocks=handoff.blocks[:, : spans[Kind.COMPRESSED].stop],
            block_checks={k: handoff.block_checks[k] for k in spans},
        ).to_bytes()
    )
    with pytest.raises(HandOffRefused, match="no INDEXER") as caught:
        import_sequence(bench.runner, forgot, max_new_tokens=8)
    assert caught.value.kind is Kind.INDEXER


@pytest.mark.parametrize("length", [96, 97, 100, 101])
def test_b014_an_open_cell_lands_where_the_receivers_slot_wants_it(bench, lab, length):
    """By logical position: between pools of 24 and 400 blocks, other slots and other places."""
    ids, after = bench.ids(length), bench.ids(20)
    single = bench.cold(ids, after)
    sender = lab.engine.runner
    busy = sender.start(ids_of(40, seed=3))  # so that slot and places are others
    sender.prefill(busy)
    handoff = exported(sender, ids)
    sender.finish(busy)
    state = state_of(sender.model.geometry, handoff.state, length)
    for tail in (*state.tails.main, *state.tails.index):
        if tail is not None:
            rows = np.abs(np.asarray(tail.gate)).any(axis=-1)
            assert rows.tolist() == [at < length % len(rows) for at in range(len(rows))]
    handoff = readdressed(handoff, bench.runner)
    assert decoded(bench.runner, handoff, after) == [digest(row) for row in single.after]


def test_b114_nothing_is_decoded_before_the_last_byte_is_there(bench, lab):
    ids, after = bench.ids(50), bench.ids(6)
    single = bench.cold(ids, after)
    handoff = readdressed(exported(lab.engine.runner, ids), bench.runner)
    data = handoff.to_bytes()
    for length in (*range(0, len(data), len(data) // 40), len(data) - 1):
        with pytest.raises(HandOffRefused):
            HandOff.from_bytes(data[:length])
        assert_at_rest(bench.runner)
    # Once it is, nobody has to wait: reads of the cache are dispatched behind its writes.
    rows = decoded(bench.runner, HandOff.from_bytes(data), after)
    assert rows == [digest(row) for row in single.after]


def test_b114_a_file_is_there_when_it_is_whole(bench, lab, tmp_path, monkeypatch):
    handoff, path = exported(lab.engine.runner, bench.ids(50)), tmp_path / "sequence"

    def interrupted(source, target):
        assert HandOff.read(source).computed == 50
        assert not path.exists()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", interrupted)
        with pytest.raises(HandOffRefused, match="No space left on device"):
            handoff.write(path)
    assert list(tmp_path.iterdir()) == []
    handoff.write(path)
    assert HandOff.read(path).computed == 50


def test_b117_blocks_are_given_back_after_the_copy_and_may_be_used_at_once(lab, monkeypatch):
    ids = ids_of(50, seed=1)
    alone = lab.alone(ids, 20)
    engine, seen = lab.engine, []
    allocator, real = engine.runner.allocator, jax.device_get

    def copied(tree):
        sequence = task_of(handle).sequence
        entries = np.concatenate([sequence.shared.entries, sequence.own.entries])
        seen.append(allocator.entries.leases[entries[:4]].min())  # the sequence's and the copy's
        return real(tree)

    handle = lab.submit(ids, 20)
    lab.until(lambda: len(handle.output.pieces) == 6)
    monkeypatch.setattr(parking.jax, "device_get", copied)
    handoff = engine.hand_off(handle)
    monkeypatch.setattr(parking.jax, "device_get", real)
    assert seen == [2]
    assert engine.runner.free_slots == SLOTS
    assert_at_rest(engine.runner)
    # Every slot and every block is somebody else's before a byte is sent.
    others = [lab.submit(ids_of(100, seed=20 + i), 20) for i in range(SLOTS)]
    lab.finish(*others)
    engine.runner.allocator.evict(blocks=allocator.evictable(Form.BLOCK))
    data = handoff.to_bytes()
    after = engine.take_over(
        HandOff.from_bytes(data), Request(prompt=handoff.prompt, max_new_tokens=20)
    )
    lab.finish(after)
    assert after.output.tokens == alone.tokens
    engine.drain()


@pytest.mark.parametrize("when", ["state", "blocks"])
def test_b118_an_abort_in_the_middle_of_a_copy_frees_nothing_that_is_copied(lab, monkeypatch, when):
    ids = ids_of(50, seed=2)
    alone = lab.alone(ids, 20)
    engine, runner = lab.engine, lab.engine.runner
    handle = lab.submit(ids, 20)
    lab.until(lambda: len(handle.output.pieces) == 6)
    name = {"state": "read_state", "blocks": "read_blocks"}[when]
    real = getattr(runner.steps, name)

    def aborted(*args):
        before = used(runner)
        places = runner.allocator.entries.place[Tier.DEVICE].copy()
        entries = task_of(handle).sequence.own.entries[:4]
        handle.cancel()
        assert handle.output.finish is Finish.CANCELLED
        # Those with tokens stay until they are copied; only what was reserved behind them goes.
        assert runner.allocator.entries.leases[entries].min() == 1
        assert (runner.allocator.entries.place[Tier.DEVICE, entries] == places[entries]).all()
        assert before > used(runner) >= 4
        return real(*args)

    monkeypatch.setattr(runner.steps, name, aborted)
    with pytest.raises(HandOffRefused, match="ended while it was copied"):
        engine.hand_off(handle)
    monkeypatch.setattr(runner.steps, name, real)
    assert handle.output.finish is Finish.CANCELLED
    assert engine.counters.ended[Finish.HANDED_OFF] == 0
    assert_at_rest(runner)
    assert runner.allocator.available(Form.BLOCK) == BLOCKS - 3  # its prompt is published
    again = lab.submit(ids, 20)
    lab.finish(again)
    assert same(again.output, alone)
    engine.drain()


def test_b118_a_copy_that_fails_leaves_the_request_running(lab, monkeypatch):
    ids = ids_of(50, seed=3)
    alone = lab.alone(ids, 20)
    handle = lab.submit(ids, 20)
    lab.until(lambda: len(handle.output.pieces) == 6)
    with monkeypatch.context() as patch:
        patch.setattr(parking.jax, "device_get", lambda tree: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            lab.engine.hand_off(handle)
    lab.finish(handle)
    assert same(handle.output, alone)
    lab.engine.drain()


def test_a_decode_process_goes_on_from_a_prefill_process(runner, monkeypatch):
    """Two processes and a pipe; see ``verify_handoff``. The other one is of the same identity."""
    # What a process computes with is a part of its identity.
    monkeypatch.setenv("JAX_NUMPY_DTYPE_PROMOTION", jax.config.jax_numpy_dtype_promotion)
    identity = identify(runner.model, runner.options)
    for owner in (runner, runner.directory):
        monkeypatch.setattr(owner, "identity", identity)
    result = verify_handoff.verify("deepseek_v4", 6, 0, runner=runner)
    assert result["ok"]
    assert (result["cases"], result["mismatches"]) == (6, 0)
    assert_at_rest(runner)

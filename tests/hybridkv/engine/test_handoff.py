"""A sequence that is handed off goes on elsewhere with the bits of an unbroken one, or not."""

import dataclasses
import json

import numpy as np
import pytest
import safetensors.numpy
from engines import BLOCKS, PER_SEQUENCE, TILE, VOCAB, Letters, ids_of, same, task_of, words
from toy import digest

from hybridkv.blocks.entries import Form
from hybridkv.engine.handoff import export_sequence, import_sequence
from hybridkv.engine.requests import Finish, Request
from hybridkv.engine.sampling import SamplingOptions
from hybridkv.engine.scheduler import Stage
from hybridkv.engine.task import Task
from hybridkv.errors import UserError
from hybridkv.kinds import Kind
from hybridkv.prefixes.plan import Plan
from hybridkv.prefixes.policy import DENSE
from hybridkv.tiers.handoff_record import HandOff, HandOffRefused

PROMPT, NEW = ids_of(2 * TILE + 3, seed=1), 40
PENALISED = SamplingOptions(temperature=1.3, repetition_penalty=1.4, seed=11)


@pytest.fixture
def rows(monkeypatch):
    """Digests of the logits that each task's tokens were chosen from."""
    seen = {}

    def note(task, row):
        seen.setdefault(task, []).append(digest(row))

    monkeypatch.setattr(Task, "note_logits", note)
    return seen


def through_bytes(handoff):
    return HandOff.from_bytes(handoff.to_bytes())


def take_over(lab, handoff, new=NEW, **more):
    return lab.engine.take_over(handoff, Request(prompt=handoff.prompt, max_new_tokens=new, **more))


def handed_off(lab, ids=PROMPT, new=NEW, at=10, **more):
    """A request that was handed off with so many tokens, and its output there."""
    handle = lab.submit(ids, new, **more)
    lab.until(lambda: len(handle.output.pieces) == at)
    handoff = lab.engine.hand_off(handle)
    assert handle.done
    return through_bytes(handoff), handle.output


@pytest.mark.parametrize("sampling", [SamplingOptions(), PENALISED], ids=["greedy", "penalised"])
@pytest.mark.parametrize("receiver", ["empty", "has the prompt"])
def test_it_goes_on_with_the_bits_of_an_unbroken_one(lab, rows, receiver, sampling):
    whole = lab.submit(PROMPT, NEW, sampling=sampling)
    lab.finish(whole)
    lab.engine.reset()
    handoff, before = handed_off(lab, sampling=sampling)
    assert (before.finish, len(before.tokens)) == (Finish.HANDED_OFF, 10)
    lab.engine.reset()
    if receiver == "has the prompt":
        lab.submit(PROMPT, 1).result()
        lab.submit(ids_of(5, seed=9), 30)  # so that slot and blocks are others
        lab.steps(3)
    after = take_over(lab, handoff, sampling=sampling)
    task = task_of(after)
    lab.until(lambda: task.stage is Stage.DECODING)
    assert len(task.sequence.shared.entries) == (0 if receiver == "empty" else 2)
    lab.finish(after)
    assert after.output.tokens == whole.output.tokens
    assert after.output.taken_over == 10
    assert after.output.exact
    assert rows[task] == rows[task_of(whole)][10:]
    lab.engine.drain()
    assert lab.engine.counters.ended[Finish.HANDED_OFF] == 1
    assert lab.engine.counters.lost_states == 0


def test_at_every_phase_of_the_open_cells(lab, rows):
    """Handed round after each token: every place modulo every ratio."""
    whole = lab.submit(PROMPT, NEW)
    lab.finish(whole)
    handle, seen, phases = lab.submit(PROMPT, NEW), [], set()
    for count in range(1, 2 * TILE):
        output = handle.output
        lab.until(lambda output=output, count=count: len(output.pieces) == count)
        handoff = through_bytes(lab.engine.hand_off(handle))
        phases.add(handoff.computed % TILE)
        seen += rows[task_of(handle)]
        lab.engine.reset()
        handle = take_over(lab, handoff)
    lab.finish(handle)
    assert phases == set(range(TILE))
    assert handle.output.tokens == whole.output.tokens
    assert seen + rows[task_of(handle)] == rows[task_of(whole)]


def test_what_it_brings_is_published_and_others_resume_from_it(lab):
    other = np.concatenate([PROMPT, ids_of(20, seed=4)])
    alone = lab.alone(other, 6)
    handoff, _ = handed_off(lab)
    lab.engine.reset()
    handle = take_over(lab, handoff)
    lab.finish(handle)
    output = lab.submit(other, 6).result()
    assert output.plan.shared == 2 * TILE
    assert same(output, alone)
    lab.engine.drain()


def test_a_parked_one_is_handed_off_from_where_it_is(lab):
    alone = lab.alone(PROMPT, NEW)
    handle = lab.submit(PROMPT, NEW)
    lab.until(lambda: len(handle.output.pieces) == 7)
    lab.engine.seating.preempt(task_of(handle))
    parked = lab.engine.hand_off(handle)
    assert lab.engine.seating.parked_bytes == 0
    running, _ = handed_off(lab, at=7)
    np.testing.assert_array_equal(parked.blocks, running.blocks)
    np.testing.assert_array_equal(parked.state, running.state)
    after = take_over(lab, through_bytes(parked))
    lab.finish(after)
    assert after.output.tokens == alone.tokens


def test_it_waits_for_a_seat_like_a_parked_one_and_may_be_cancelled(lab):
    handoff, _ = handed_off(lab)
    others = [lab.submit(ids_of(5, seed=50 + i), 60, priority=9) for i in range(3)]
    lab.until(lambda: all(task_of(h).stage is Stage.DECODING for h in others))
    one, two = take_over(lab, handoff), take_over(lab, handoff)
    lab.steps(3)
    assert {task_of(one).stage, task_of(two).stage} == {Stage.PARKED}
    one.cancel()
    others[0].cancel()
    lab.finish(two)
    assert len(two.output.tokens) == NEW
    assert one.output.tokens == two.output.tokens[:10]
    for other in others:
        other.cancel()


def test_one_whose_bytes_are_lost_after_it_was_taken_says_so_and_completes(lab):
    handoff, before = handed_off(lab)
    handle = take_over(lab, handoff)
    task = task_of(handle)
    task.parked = dataclasses.replace(task.parked, digest=b"other")
    lab.finish(handle)
    assert (handle.output.finish, handle.output.exact) == (Finish.LENGTH, False)
    assert handle.output.tokens[:10] == before.tokens
    # What was computed again as a prompt is a prompt for nobody else.
    again = lab.submit(PROMPT, NEW)
    lab.until(lambda: len(again.output.pieces) == 5)
    task = task_of(again)
    lab.engine.seating.preempt(task)
    task.parked = dataclasses.replace(task.parked, digest=b"other")
    with pytest.raises(HandOffRefused, match="digest"):
        lab.engine.hand_off(again)
    lab.until(lambda: task.stage is Stage.DECODING)
    lab.until(lambda: len(again.output.pieces) == 9)
    last = lab.engine.hand_off(again)
    assert (last.prompt_tokens, last.exact) == (len(PROMPT), False)
    after = take_over(lab, last)
    lab.finish(after)
    assert after.output.tokens[:9] == again.output.tokens
    assert not after.output.exact
    lab.engine.drain()


def test_text_and_stops_go_on_where_they_were(lab):
    """A stop string that begins with the sender's last tokens ends the receiver's output."""
    tokens = lab.alone(PROMPT, NEW).tokens
    stop = words(tokens[8:13])
    lab.change(text=Letters())
    handoff, before = handed_off(lab, at=11, stop=(stop,))
    assert (before.text, before.last_text) == (words(tokens[:8]), "")
    after = take_over(lab, handoff, stop=(stop,))
    lab.finish(after)
    assert (after.output.finish, after.output.text) == (Finish.STOP, words(tokens[:8]))
    assert after.output.tokens == tokens[:13]
    with pytest.raises(HandOffRefused, match="ends with its token 3"):
        take_over(lab, handoff, stop=(words(tokens[1:3]),))
    lab.engine.drain()


def test_sample_i_goes_on_with_seed_plus_i(lab):
    sampling = SamplingOptions(temperature=1.2, seed=5)
    whole = lab.submit(PROMPT, 12, samples=2, sampling=sampling)
    lab.finish(whole)
    both = lab.submit(PROMPT, 12, samples=2, sampling=sampling)
    lab.until(lambda: len(both.outputs[1].pieces) == 4)
    handoff = lab.engine.hand_off(both, sample=1)
    lab.finish(both)
    after = take_over(lab, handoff, 12, sampling=dataclasses.replace(sampling, seed=6))
    lab.finish(after)
    assert after.output.tokens == whole.outputs[1].tokens
    assert both.outputs[0].tokens == whole.outputs[0].tokens
    lab.engine.drain()


def test_a_request_that_does_not_decode_is_not_handed_off(lab):
    handle = lab.submit(ids_of(5 * TILE, seed=2), 6)
    for _ in range(2):  # in the queue, then with a part of its prompt
        with pytest.raises(HandOffRefused, match="no token yet"):
            lab.engine.hand_off(handle)
        lab.steps(1)
    lab.finish(handle)
    with pytest.raises(HandOffRefused, match="has ended"):
        lab.engine.hand_off(handle)
    lab.engine.drain()


def test_a_request_that_is_not_its_own_is_refused_and_nothing_is_taken(lab):
    handoff, _ = handed_off(lab, at=10)
    engine = lab.engine
    before = engine.counters.submitted
    wrong = {
        "another prompt": Request(prompt=PROMPT[:-1], max_new_tokens=NEW),
        "samples=1": Request(prompt=PROMPT, max_new_tokens=NEW, samples=2),
        "ends with its token 10": Request(prompt=PROMPT, max_new_tokens=10),
        "namespace": Request(prompt=PROMPT, max_new_tokens=NEW, namespace="another"),
    }
    for text, request in wrong.items():
        with pytest.raises(HandOffRefused, match=text):
            engine.take_over(handoff, request)
    with pytest.raises(UserError, match="tokens"):
        engine.take_over(handoff, Request(prompt=PROMPT, max_new_tokens=BLOCKS * TILE))
    nothing_chosen = dataclasses.replace(handoff, tokens=handoff.tokens[: handoff.computed])
    with pytest.raises(HandOffRefused, match="0 tokens were chosen"):
        take_over(lab, nothing_chosen)
    assert engine.counters.submitted == before
    assert engine.waiting == engine.seating.parked_bytes == 0


@pytest.mark.parametrize("part", ["geometry", "weights", "layout", "numerics"])
def test_a_foreign_identity_is_refused_by_its_parts(lab, part):
    handoff, _ = handed_off(lab)
    identity = dataclasses.replace(handoff.identity, **{part: "another"})
    foreign = dataclasses.replace(handoff, identity=identity, root=identity.root())
    with pytest.raises(HandOffRefused, match=rf"\({part} differ\)"):
        take_over(lab, through_bytes(foreign))


KINDS = (Kind.COMPRESSED, Kind.INDEXER, Kind.WINDOW, Kind.TAIL)


def without(handoff, kind):
    """A hand-off by a sender that does not know a kind: whole in itself."""
    blocks, state = dict(handoff.block_spans), dict(handoff.state_spans)

    def cut(spans, array):
        kept = {k: array[..., span] for k, span in spans.items() if k is not kind}
        sizes = np.cumsum([0, *(x.shape[-1] for x in kept.values())])
        spans = {
            k: slice(int(a), int(b)) for k, a, b in zip(kept, sizes[:-1], sizes[1:], strict=True)
        }
        return spans, np.concatenate([array[..., :0], *kept.values()], axis=-1)

    block_spans, words_of_blocks = cut(blocks, handoff.blocks)
    state_spans, words_of_state = cut(state, handoff.state)
    made = {"blocks", "state", "block_spans", "state_spans", "block_checks", "state_checks"}
    fields = {f.name: getattr(handoff, f.name) for f in dataclasses.fields(handoff)}
    return HandOff.of(
        **{name: value for name, value in fields.items() if name not in made},
        blocks=words_of_blocks,
        state=words_of_state,
        block_spans=block_spans,
        state_spans=state_spans,
    )


def send_without(lab, handoff, kind, how):
    data = handoff.to_bytes()
    tensors = safetensors.numpy.load(data)
    if kind is Kind.DISK_PREFIX:
        return HandOff.from_bytes(safetensors.numpy.save(tensors))
    if how == "unknown to the sender":
        return take_over(lab, through_bytes(without(handoff, kind)), 14)
    del tensors[kind.value]
    return HandOff.from_bytes(safetensors.numpy.save(tensors, metadata_of(data)))


@pytest.mark.parametrize("how", ["cut out of the bytes", "unknown to the sender"])
@pytest.mark.parametrize("kind", [*KINDS, Kind.DISK_PREFIX], ids=lambda kind: kind.value)
def test_it_is_refused_with_any_kind_missing_and_the_sender_goes_on(lab, kind, how):
    """DISK_PREFIX stands for the record itself."""
    alone = lab.alone(PROMPT, 14)
    handoff, _ = handed_off(lab, new=14)
    with pytest.raises(HandOffRefused) as caught:
        send_without(lab, handoff, kind, how)
    assert caught.value.kind is kind
    assert "\n" not in str(caught.value)
    after = take_over(lab, handoff, 14)  # the sender keeps it until the receiver has confirmed
    lab.finish(after)
    assert after.output.tokens == alone.tokens


def metadata_of(data):
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size])["__metadata__"]


def test_bytes_that_change_after_they_were_read_are_refused(lab):
    handoff, _ = handed_off(lab)
    handoff.state.setflags(write=True)
    handoff.state[handoff.state_spans[Kind.TAIL].start] ^= 1
    with pytest.raises(HandOffRefused, match="TAIL of the state"):
        take_over(lab, handoff)


def test_rows_of_another_decode_batch_are_not_called_exact(lab):
    """Where slots are decoded in one batch, its size may change a bit; prompts never do."""
    handoff, _ = handed_off(lab)
    after = take_over(lab, dataclasses.replace(handoff, decode="7 slots"))
    lab.finish(after)
    assert not after.output.exact
    first, _ = handed_off(lab, at=1)
    assert first.generated.size == 0
    after = take_over(lab, dataclasses.replace(first, decode="7 slots"))
    lab.finish(after)
    assert after.output.exact


# One floor below: a runner's sequences.


def decode_all(runner, sequence, tokens):
    return [digest(runner.decode({sequence: int(t)})[sequence]) for t in tokens]


def test_a_prompt_is_handed_off_between_any_two_tiles(lab):
    runner = lab.engine.runner
    ids, after = ids_of(5 * TILE + 6, seed=3), ids_of(5, seed=4)

    def rest(sequence):
        last = [np.asarray(runner.tile(sequence))[0] for _ in range(0, sequence.tokens_left, TILE)]
        logits = digest(last[-1]), decode_all(runner, sequence, after)
        runner.release(sequence)
        return logits

    expected = rest(runner.start(ids, max_new_tokens=6))
    for tiles in range(1, 6):
        sequence = runner.start(ids, max_new_tokens=6)
        for _ in range(tiles):
            runner.tile(sequence)
        handoff = through_bytes(export_sequence(runner, sequence))
        assert (handoff.computed, handoff.pending.size) == (tiles * TILE, 0)
        runner.release(sequence)
        lab.engine.reset()
        taken = import_sequence(runner, handoff, max_new_tokens=6)
        assert taken.tokens_left == len(ids) - tiles * TILE
        assert rest(taken) == expected
        lab.engine.reset()


def test_a_sequence_with_nothing_computed_or_in_a_replay_is_not_exported(lab):
    runner = lab.engine.runner
    ids = ids_of(6 * TILE + 2, seed=5)
    sequence = runner.start(ids)
    with pytest.raises(HandOffRefused, match="nothing of the sequence"):
        export_sequence(runner, sequence)
    runner.prefill(sequence)
    runner.finish(sequence)
    with pytest.raises(HandOffRefused, match="nothing of the sequence"):
        export_sequence(runner, sequence)
    fork = np.concatenate([ids[: 5 * TILE], (ids[5 * TILE :] + 1) % VOCAB])
    replaying = runner.start(fork)
    assert isinstance(replaying.plan, Plan)
    assert 0 < replaying.start < replaying.exact_from
    with pytest.raises(HandOffRefused, match="is replaying"):
        export_sequence(runner, replaying)
    runner.release(replaying)


def test_what_it_exports_is_a_function_of_its_tokens(lab):
    """Whatever its slot and blocks held before, and whichever they are."""
    runner, found = lab.engine.runner, []
    for seed in range(2):
        others = [runner.start(ids_of(60, seed=30 + seed)) for _ in range(seed + 1)]
        for other in others:
            runner.prefill(other)
        runner.release(others[-1])
        sequence = runner.start(PROMPT, max_new_tokens=4, policy=DENSE, namespace="n")
        runner.prefill(sequence)
        decode_all(runner, sequence, [1, 2])
        found.append(export_sequence(runner, sequence, next_token=5))
        for each in (sequence, *others[:-1]):
            runner.release(each)
        lab.engine.reset()
    for field in ("blocks", "state", "tokens"):
        np.testing.assert_array_equal(getattr(found[0], field), getattr(found[1], field))


def test_a_receiver_without_room_holds_nothing(lab):
    runner = lab.engine.runner
    handoff, _ = handed_off(lab)
    lab.engine.reset()
    held = runner.allocator.reserve(blocks=BLOCKS - 2)
    with pytest.raises(Exception, match="do not fit DEVICE now"):
        import_sequence(runner, handoff, max_new_tokens=4)
    runner.allocator.cancel(held)
    assert runner.allocator.available(Form.BLOCK) == BLOCKS
    with pytest.raises(UserError, match="a sequence: use one of a larger capacity"):
        import_sequence(runner, handoff, max_new_tokens=PER_SEQUENCE * TILE)

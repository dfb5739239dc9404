"""The five kinds x device, host, disk, hand-off, with one kind taken away each.

A prompt of eight blocks was stored and a prompt that goes on from it wants all of it. Then one kind
of its last block but one, or of the state at its end, is taken away: its bit in the bookkeeping, or
words of it in the bytes. Nothing is decoded from what is left: the plan is shorter or a miss, or
the sequence is refused, the kind is named, and the logits are those of a cold run.
"""

import contextlib
import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy
from tiered import PLACES, assert_tiers_at_rest, give_tiers, place, stored, with_tiers

from hybridkv.blocks.entries import Form, Tier, kind_bits
from hybridkv.engine.handoff import export_sequence, import_sequence
from hybridkv.kinds import Kind
from hybridkv.prefixes.plan import Action, Miss, Outcome, Plan
from hybridkv.prefixes.policy import DEFAULT
from hybridkv.state.packing import block_spans, snapshot_spans
from hybridkv.tiers.handoff_record import HandOff, HandOffRefused
from hybridkv.tiers.options import TierOptions
from scenarios.runs import Bench, Run, start_of

END = 8 * 16
"""Where the prompt resumes; a multiple of the tile."""
IN_BLOCKS = (Kind.COMPRESSED, Kind.INDEXER)
IN_ENTRIES = (*IN_BLOCKS, Kind.WINDOW, Kind.TAIL)
WITHOUT_A_RECORD = {
    Tier.DEVICE: "a prefix on the device is found in the directory: no record of it is read",
    Tier.HOST: "host memory has the bytes and their digests: no record of it is read",
}
"""Where there is no record to take away, and why."""
BITS = [(kind, tier, "bit") for tier in Tier for kind in IN_ENTRIES]
"""The bookkeeping no longer has the kind."""
BYTES = [(kind, tier, "words") for tier in (Tier.HOST, Tier.DISK) for kind in IN_ENTRIES]
"""A word is another. On the device there are no digests: who writes there is the engine itself."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """What all cells have in common."""

    bench: Bench
    prompt: np.ndarray
    after: np.ndarray
    cold: Run

    @property
    def runner(self):
        return self.bench.runner

    @property
    def mover(self):
        return self.runner.mover

    def store(self, namespace):
        """The prompt's beginning, on all tiers; its blocks, and the snapshot at its end."""
        ids = np.concatenate([self.prompt[:END], (self.prompt[END : END + 3] + 1) % 8])
        self.bench.run(ids, ids[:0], namespace, policy=DEFAULT)
        assert self.mover.flush(timeout_s=300)
        blocks, snapshots = stored(self.runner, ids, namespace)
        assert (len(blocks), len(snapshots)) == (8, 1)
        return blocks, int(snapshots[0])

    def put(self, namespace, tier):
        """Stored on one tier alone; returns which entry of it has which kind taken away."""
        blocks, snapshot = self.store(namespace)
        place(self.runner, np.append(blocks, snapshot).astype(np.int32), tier, alone=True)
        return dict.fromkeys(IN_BLOCKS, int(blocks[-2])) | {
            Kind.WINDOW: snapshot,
            Kind.TAIL: snapshot,
        }

    def plan(self, namespace):
        chain = self.runner.chain(self.prompt, namespace=namespace)
        return self.runner.plan(chain, namespace=namespace, loads=True)

    def run(self, namespace):
        return self.bench.run(self.prompt, self.after, namespace)


@pytest.fixture(scope="module")
def case(runner, tmp_path_factory):
    with with_tiers(runner, tmp_path_factory.mktemp("matrix") / "store"):
        bench = Bench(runner, seed=5)
        prompt, after = bench.ids(END + 21), bench.ids(4)
        yield Case(bench=bench, prompt=prompt, after=after, cold=bench.cold(prompt, after))


@pytest.fixture
def own_store(case, tmp_path):
    """A store that this test may break."""
    before = case.runner.sizes.tiers
    give_tiers(case.runner, dataclasses.replace(before, path=tmp_path / "store"))
    yield tmp_path / "store"
    give_tiers(case.runner, before)


@pytest.fixture(autouse=True)
def _at_rest(case):
    yield
    case.mover.flush(timeout_s=300)  # False after a write that failed
    assert not case.mover.busy
    assert_tiers_at_rest(case.runner)


def is_whole(plan, tier):
    """A plan that reuses everything, from where it is."""
    outcome = Outcome.REUSE if tier == Tier.DEVICE else Outcome.LOAD_THEN_REUSE
    return isinstance(plan, Plan) and (plan.start, plan.outcome) == (END, outcome)


def blamed(plan):
    return {loss.kind for loss in plan.losses} | ({plan.kind} if isinstance(plan, Miss) else set())


def flip(array, span):
    """A copy in which one bit of the span is another."""
    changed = np.array(array)
    changed[span.start + (span.stop - span.start) // 2] ^= np.uint32(1 << 9)
    return changed


def damage_host(case, entry, kind, span):
    """One bit in pinned memory."""
    columns, host = case.runner.allocator.entries, case.mover._host
    form, at = Form(columns.form[entry]), int(columns.place[Tier.HOST, entry])
    held = host.at(form, at)
    changed = jax.device_put(flip(held.words, span), held.words.sharding)
    host.keep(at, dataclasses.replace(held, words=changed))


def damage_disk(case, entry, kind, span):
    """One bit in the file that has the words."""
    store = case.mover.store
    digest = case.runner.allocator.entries.digest[entry].tobytes()
    if kind in IN_BLOCKS:
        at = store.find(digest)
        ((_, rows),) = store.read_segments([at.segment])
        words, folder = rows[at.index], store.path / "segments" / at.segment
    else:
        name = store.find_snapshot(digest)
        words, folder = store.read_snapshot(name), store.path / "snapshots" / name
    old, new = words[span].tobytes(), flip(words, span)[span].tobytes()
    holding = [f for f in folder.rglob("*") if f.is_file() and old in f.read_bytes()]
    assert len(holding) == 1
    data = holding[0].read_bytes()
    assert data.count(old) == 1
    holding[0].write_bytes(data.replace(old, new))


@contextlib.contextmanager
def taken_away(case, tier, entry, kind, how):
    """A bit comes back, so that what else the entry is for stays as it was."""
    if how == "bit":
        kinds = case.runner.allocator.entries.kinds
        before = kinds[entry]
        kinds[entry] &= np.uint8(0xFF ^ kind_bits((kind,)))
        yield
        kinds[entry] = before
        return
    geometry = case.runner.model.geometry
    spans = block_spans(geometry) if kind in IN_BLOCKS else snapshot_spans(geometry)
    damage = {Tier.HOST: damage_host, Tier.DISK: damage_disk}[tier]
    damage(case, entry, kind, spans[kind])
    yield


@pytest.mark.parametrize(
    ("kind", "tier", "how"),
    [*BITS, *BYTES],
    ids=lambda x: x if isinstance(x, str) else x.name.lower(),
)
def test_without_a_kind_less_is_reused_and_the_kind_is_blamed(case, kind, tier, how):
    namespace = case.bench.namespace()
    entry = case.put(namespace, tier)[kind]
    assert is_whole(case.plan(namespace), tier)
    failed = case.mover.counters.failed_loads
    with taken_away(case, tier, entry, kind, how):
        planned, warm = case.plan(namespace), case.run(namespace)
    if how == "bit":
        assert start_of(planned) < END
        assert kind in blamed(planned)
        assert case.mover.counters.failed_loads == failed
    else:
        assert is_whole(planned, tier)  # nobody knows yet
        assert case.mover.counters.failed_loads == failed + 1
        assert kind.value in case.mover.counters.last_error.lower()
    assert warm.start < END
    assert kind in blamed(warm.plan)
    assert warm.continues(case.cold)
    # What can't be used is forgotten: the next one finds what was computed instead.
    again = case.run(namespace)
    assert again.start > 0
    assert again.shared >= END
    assert again.continues(case.cold)
    assert case.mover.counters.failed_loads == failed + (how == "words")


@pytest.mark.parametrize("tier", [pytest.param(t, id=t.name.lower()) for t in WITHOUT_A_RECORD])
def test_the_record_is_no_part_of_what_is_not_on_disk(case, own_store, tier):
    """``WITHOUT_A_RECORD`` says why: the whole store may go and nothing changes."""
    namespace = case.bench.namespace()
    case.put(namespace, tier)
    shutil.rmtree(own_store)
    plan = case.plan(namespace)
    assert is_whole(plan, tier)
    assert Kind.DISK_PREFIX not in plan.needs
    warm = case.run(namespace)
    assert warm.start == END
    assert warm.continues(case.cold)
    with pytest.raises(ValueError, match="no entry holds DISK_PREFIX"):
        kind_bits((Kind.DISK_PREFIX,))


def test_without_the_bytes_behind_a_record_the_record_is_blamed(case, own_store):
    namespace = case.bench.namespace()
    case.put(namespace, Tier.DISK)
    planned, failed = case.plan(namespace), case.mover.counters.failed_loads
    assert is_whole(planned, Tier.DISK)
    assert planned.needs[Kind.DISK_PREFIX] is Action.LOAD
    shutil.rmtree(own_store / "segments")
    warm = case.run(namespace)
    assert warm.start < END
    assert Kind.DISK_PREFIX in blamed(warm.plan)
    assert warm.continues(case.cold)
    assert case.mover.counters.failed_loads == failed + 1


def test_without_its_manifest_a_prefix_is_not_in_the_store(case, own_store):
    """For a reader that had seen it, and for whoever comes after a restart."""
    namespace = case.bench.namespace()
    case.store(namespace)
    reader = TierOptions(disk=PLACES, path=own_store, writable=False)
    mover = give_tiers(case.runner, reader)
    assert is_whole(case.plan(namespace), Tier.DISK)
    case.run(namespace)  # so that the ideal hit is known
    blocks, snapshots = stored(case.runner, case.prompt[:END], namespace)
    place(case.runner, np.concatenate([blocks, snapshots]), Tier.DISK)
    for manifest in (own_store / "manifests").iterdir():
        manifest.unlink()
    mover.refresh()
    warm = case.run(namespace)
    assert warm.start == 0
    assert Kind.DISK_PREFIX in blamed(warm.plan)
    assert warm.continues(case.cold)
    give_tiers(case.runner, reader)
    after = case.run(namespace)
    assert isinstance(after.plan, Miss)
    assert after.continues(case.cold)


def exported(case, namespace):
    """The prompt, computed and handed off; its sender published nothing of it."""
    runner = case.runner
    sequence = runner.start(case.prompt, max_new_tokens=5, namespace=namespace)
    while sequence.tokens_left:
        runner.tile(sequence)
    data = export_sequence(runner, sequence).to_bytes()
    runner.release(sequence)
    return data


def without(data, kind):
    """A hand-off's bytes without the kind's array, or without the record of what it is."""
    size = int.from_bytes(data[:8], "little")
    metadata = json.loads(data[8 : 8 + size])["__metadata__"]
    tensors = safetensors.numpy.load(data)
    if kind is Kind.DISK_PREFIX:
        del metadata["header"]
    else:
        del tensors[kind.value]
    return safetensors.numpy.save(tensors, metadata)


def damaged(data, kind):
    """The same with one bit of it that is another."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    if kind is Kind.DISK_PREFIX:
        at = data.index(b"prompt_tokens")
    else:
        at = 8 + size + sum(header[kind.value]["data_offsets"]) // 2
    return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]


@pytest.mark.parametrize("take", [without, damaged], ids=["missing", "damaged"])
@pytest.mark.parametrize("kind", list(Kind), ids=lambda kind: kind.value)
def test_a_sequence_without_a_kind_is_not_taken_over(case, kind, take):
    runner, namespace = case.runner, case.bench.namespace()
    data = exported(case, namespace)
    with pytest.raises(HandOffRefused) as refused:
        HandOff.from_bytes(take(data, kind))
    assert refused.value.kind is kind
    assert "\n" not in str(refused.value)
    whole = HandOff.from_bytes(data)
    if kind is not Kind.DISK_PREFIX:  # the same for one that comes without bytes
        spans = {**whole.block_spans, **whole.state_spans}
        parts = {
            name: {k: v for k, v in getattr(whole, name).items() if k is not kind}
            for name in ("block_spans", "state_spans")
        }
        assert kind in spans
        with pytest.raises(HandOffRefused) as refused:
            import_sequence(
                runner,
                dataclasses.replace(whole, **parts),
                max_new_tokens=5,
                namespace=namespace,
            )
        assert refused.value.kind is kind
    assert_tiers_at_rest(runner)
    # Whoever was refused computes the prompt.
    warm = case.run(namespace)
    assert isinstance(warm.plan, Miss)
    assert warm.continues(case.cold)


def test_whole_it_is_taken_over_with_the_bits_of_a_cold_run(case):
    runner, namespace = case.runner, case.bench.namespace()
    whole = HandOff.from_bytes(exported(case, namespace))
    taken = import_sequence(runner, whole, max_new_tokens=5, namespace=namespace)
    rows = case.bench.decode(taken, case.after)
    runner.finish(taken)
    np.testing.assert_array_equal(rows, case.cold.after)


def test_every_kind_is_taken_away_everywhere():
    cells = {(kind, tier.name) for kind, tier, _ in (*BITS, *BYTES)}
    cells |= {(Kind.DISK_PREFIX, tier.name) for tier in (*WITHOUT_A_RECORD, Tier.DISK)}
    cells |= {(kind, "hand-off") for kind in Kind}
    assert len(cells) == len(Kind) * (len(Tier) + 1)

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from compiling import compilations
from toy import digest, prompt, toy_options, toy_runtime

from hybridkv.blocks.entries import Form, Tier
from hybridkv.blocks.pools import NeverFits, NoRoom
from hybridkv.engine.numerics import identify, numerics_id
from hybridkv.engine.runner import Runner, RunnerOptions
from hybridkv.engine.sequence import NoSlot
from hybridkv.errors import UserError
from hybridkv.prefixes.losses import Cause
from hybridkv.prefixes.plan import Miss, Outcome, Plan
from hybridkv.prefixes.policy import DENSE, NEVER, SnapshotPolicy
from hybridkv.state.capacity import Capacity
from pallas_kernels import implementations

TILE = 16
OPTIONS = toy_options(tile=TILE)
RUNTIME = toy_runtime()


def make(blocks=48, slots=2, per_sequence=14, snapshots=8, **more):
    capacity = Capacity(blocks=blocks, slots=slots, blocks_per_sequence=per_sequence)
    sizes = RunnerOptions(capacity=capacity, snapshots=snapshots, debug=True, **more)
    return Runner(RUNTIME, OPTIONS, sizes, identity=IDENTITY)


IDENTITY = identify(RUNTIME, OPTIONS)


@pytest.fixture(scope="module")
def runner():
    return make()


def run(runner, ids, **more):
    """One prompt from start to end; its sequence and logits."""
    sequence = runner.start(ids, **more)
    logits = runner.prefill(sequence)
    runner.finish(sequence)
    return sequence, logits


def used(runner, form=Form.BLOCK):
    return runner.allocator.pools[Tier.DEVICE][form].used


def test_an_exact_repetition_reuses_all_but_the_last_tile(runner):
    ids = prompt(100, seed=11)
    first, cold = run(runner, ids)
    assert isinstance(first.plan, Miss)
    second, warm = run(runner, ids)
    assert (second.plan.outcome, second.start) == (Outcome.REUSE, 96)
    assert digest(warm) == digest(cold[96:])


def test_the_second_of_three_that_share_a_beginning_replays_and_the_third_copies(runner):
    head = prompt(96, seed=12)
    prompts = [np.concatenate([head, prompt(30, seed=s)]) for s in (1, 2, 3)]
    plans = [run(runner, ids, namespace="fan")[0].plan for ids in prompts]
    assert isinstance(plans[0], Miss)
    assert (plans[1].shared, plans[1].outcome) == (96, Outcome.REBUILD)
    assert (plans[2].start, plans[2].outcome) == (96, Outcome.REUSE)


def test_under_dense_snapshots_the_second_copies(runner):
    head = prompt(96, seed=13)
    one, two = (np.concatenate([head, prompt(30, seed=s)]) for s in (1, 2))
    run(runner, one, namespace="dense", policy=DENSE)
    second, _ = run(runner, two, namespace="dense")
    assert second.start == 96


def test_what_is_stored_without_reuse_is_as_if_it_were_not(runner):
    ids = prompt(60, seed=14)
    run(runner, ids, namespace="one")
    other, _ = run(runner, ids, namespace="two")
    assert isinstance(other.plan, Miss)
    assert other.plan.ideal == 0


def test_everything_unpublished_is_free_again_after_the_end(runner):
    before = used(runner)
    ids = prompt(70, seed=15)
    sequence = runner.start(ids, max_new_tokens=40)
    runner.prefill(sequence)
    runner.decode({sequence: 5})
    runner.finish(sequence)
    assert used(runner) <= before + 70 // 16
    assert not runner.allocator.leases.open
    assert not runner.allocator.reservations.left


def test_a_sequence_ended_half_way_leaves_its_whole_blocks(runner):
    ids = prompt(100, seed=16)
    sequence = runner.start(ids)
    runner.tile(sequence)
    runner.tile(sequence)
    runner.finish(sequence)
    found = runner.plan(runner.chain(ids))
    assert isinstance(found, Plan)
    assert found.shared == 32
    assert found.ideal == 32
    with pytest.raises(UserError, match="finished"):
        runner.tile(sequence)
    with pytest.raises(UserError, match="finished"):
        runner.finish(sequence)


def test_a_sequence_that_never_computed_leaves_nothing(runner):
    ids = prompt(100, seed=17)
    before = used(runner)
    runner.finish(runner.start(ids))
    assert used(runner) <= before
    assert isinstance(runner.plan(runner.chain(ids)), Miss)


def test_two_at_once_publish_each_block_once(runner):
    ids = prompt(64, seed=18)
    one = runner.start(ids, namespace="twice")
    two = runner.start(ids, namespace="twice")
    first, second = runner.prefill(one), runner.prefill(two)
    assert digest(first) == digest(second)
    runner.finish(one)
    runner.finish(two)
    entries = runner.allocator.entries
    match = runner.directory.find(runner.chain(ids, namespace="twice"))
    assert len(match.entries) == len(set(match.entries.tolist())) == 4
    assert (entries.leases == 0).all()


def test_a_growing_conversation_hashes_only_what_is_new(runner):
    chain = runner.chain(prompt(40, seed=19), namespace="talk")
    first, _ = run(runner, chain.tokens.astype(np.int32), namespace="talk", chain=chain)
    chain.extend(prompt(40, seed=20))
    second, _ = run(runner, chain.tokens.astype(np.int32), namespace="talk", chain=chain)
    assert (first.start, second.start) == (0, 32)
    with pytest.raises(UserError, match="are not the prompt"):
        runner.start(prompt(90, seed=19), chain=chain)
    with pytest.raises(UserError, match="not of namespace 'other'"):
        runner.start(chain.tokens.astype(np.int32), chain=chain, namespace="other")


def test_no_free_slot_is_said_and_nothing_is_held():
    runner = make(slots=1)
    sequence = runner.start(prompt(40))
    with pytest.raises(NoSlot, match="all 1 slots"):
        runner.start(prompt(40))
    runner.finish(sequence)
    run(runner, prompt(40))


def test_too_little_room_now_is_told_from_a_prompt_that_never_fits():
    runner = make(blocks=10, per_sequence=14)
    run(runner, prompt(40, seed=2))
    held = runner.start(prompt(100, seed=1))
    before = runner.allocator.entries.leases.copy()
    receipts = set(runner.allocator.leases.open)
    with pytest.raises(NoRoom):
        runner.start(prompt(100, seed=2))
    np.testing.assert_array_equal(runner.allocator.entries.leases, before)
    assert set(runner.allocator.leases.open) == receipts
    with pytest.raises(NeverFits, match="never fit DEVICE"):
        runner.start(prompt(180, seed=2))
    np.testing.assert_array_equal(runner.allocator.entries.leases, before)
    runner.finish(held)
    run(runner, prompt(100, seed=2))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (np.zeros(3, np.float32), "integer array, got float32"),
        (np.array([1, -1]), "-1 is outside the vocabulary"),
        (np.array([1, 64]), "64 is outside the vocabulary"),
        (np.zeros(0, np.int32), "empty"),
        (np.zeros(300, np.int32), "the capacity is 224"),
    ],
)
def test_bad_prompts_are_refused_before_anything_is_held(runner, ids, message):
    before = used(runner)
    with pytest.raises(UserError, match=message):
        runner.start(ids)
    assert used(runner) == before
    assert not runner.allocator.leases.open


def test_without_room_for_a_snapshot_the_prompt_is_still_computed():
    runner = make(snapshots=1)
    ids = prompt(100, seed=21)
    sequence, _ = run(runner, ids, policy=DENSE)
    assert sequence.skipped_snapshots == 5
    assert runner.plan(runner.chain(ids)).shared == 96


def test_a_sequence_decodes_no_further_than_its_room(runner):
    sequence = runner.start(prompt(30, seed=22), max_new_tokens=2)
    runner.prefill(sequence)
    runner.decode({sequence: 1})
    runner.decode({sequence: 1})
    with pytest.raises(UserError, match="larger max_new_tokens"):
        runner.decode({sequence: 1})
    runner.finish(sequence)


def test_the_plan_of_a_lost_snapshot_replays_when_it_may_and_starts_earlier_when_not():
    runner = make(snapshots=2, replay=False)
    ids = prompt(150, seed=23)
    run(runner, ids, policy=NEVER)
    decision = runner.plan(runner.chain(ids))
    assert (decision.start, decision.shared) == (0, 144)
    assert runner.plan(runner.chain(ids)).explain().startswith("reuse 0 of 150 tokens")


def test_the_numerics_id_depends_on_what_fixes_bits_and_not_on_capacity():
    base = numerics_id(RUNTIME, OPTIONS)
    assert base == numerics_id(RUNTIME, OPTIONS)
    assert base != numerics_id(RUNTIME, dataclasses.replace(OPTIONS, key_block=8))
    assert base != numerics_id(RUNTIME, dataclasses.replace(OPTIONS, tile=32))
    assert base == numerics_id(RUNTIME, dataclasses.replace(OPTIONS, all_logits=False))


def test_nothing_compiles_after_warm_up(runner):
    with compilations() as compiled:
        head = prompt(96, seed=24)
        for seed in range(4):
            ids = np.concatenate([head, prompt(10 + seed, seed=seed)])
            sequence = runner.start(ids, max_new_tokens=4, namespace="compile")
            runner.prefill(sequence)
            runner.decode({sequence: 1})
            runner.finish(sequence)
        runner.allocator.evict(blocks=4)
    assert compiled == []


def test_no_snapshot_is_written_inside_the_cone_of_a_replay(runner):
    """There the state is not exact yet: whoever copied it would get other bits."""
    ids = prompt(150, seed=25)
    run(runner, ids, namespace="cone", policy=NEVER)
    second, _ = run(
        runner, np.concatenate([ids[:144], prompt(20, seed=1)]), namespace="cone", policy=DENSE
    )
    assert 0 < second.start < second.shared_tokens == 144
    for position in range(second.start + TILE, 145, TILE):
        fork = np.concatenate([ids[:position], prompt(9, seed=2)])
        _, cold = run(runner, fork, namespace=f"cold {position}", policy=NEVER)
        warm, logits = run(runner, fork, namespace="cone", policy=NEVER)
        assert digest(logits[-9:]) == digest(cold[-9:]), position
        assert warm.shared_tokens == position


def test_without_a_ledger_plans_do_not_know_the_ideal():
    runner = make(ledger=False)
    ids = prompt(60, seed=26)
    assert run(runner, ids)[0].plan.ideal is None
    decision = run(runner, ids)[0].plan
    assert (decision.start, decision.ideal, decision.losses) == (48, None, ())


def test_measuring_costs_changes_nothing_and_gives_a_model_to_plan_with(runner):
    ids = prompt(100, seed=27)
    run(runner, ids, namespace="cost")
    held = runner.start(prompt(40, seed=28), namespace="cost", max_new_tokens=4)
    first = runner.prefill(held)
    before = jax.tree.map(np.asarray, runner.cache)
    cost = runner.measure_cost(repeats=2)
    same = jax.tree.map(lambda a, b: np.array_equal(a, b), before, runner.cache)
    assert all(jax.tree.leaves(same))
    assert cost.tile_seconds > 0
    assert cost.bytes_per_second[Tier.DEVICE] > 0
    assert first.shape == (40, 64)
    runner.finish(held)
    assert run(runner, ids, namespace="cost")[0].start == 96


def standing(runner, ids):
    """Positions of a prompt that have a snapshot."""
    found = runner.directory.find(runner.chain(ids)).entries
    snapshots = runner.directory.snapshot_at(found)
    return runner.allocator.entries.position[snapshots[snapshots >= 0]].tolist()


def test_a_conversation_that_grows_keeps_only_the_ends_that_its_policy_cannot_spare(runner):
    ids, turns = prompt(208, seed=77), (48, 80, 112, 144, 176, 208)
    runner.reset()
    for turn in turns:
        sequence, _ = run(runner, ids[:turn], policy=SnapshotPolicy(thin=8.0))
    assert sequence.plan.start == 176
    assert standing(runner, ids) == [144, 208]
    lost = {loss.cause for loss in runner.plan(runner.chain(ids[:177])).losses}
    assert Cause.POLICY in lost
    assert Cause.EVICTED not in lost


def test_a_snapshot_at_which_another_prompt_went_on_stays(runner):
    ids = prompt(208, seed=78)
    runner.reset()
    for turn in (48, 80, 112):
        run(runner, ids[:turn], policy=SnapshotPolicy(thin=8.0))
    other = np.concatenate([ids[:80], prompt(40, seed=79)])
    run(runner, other)
    for turn in (144, 176, 208):
        run(runner, ids[:turn], policy=SnapshotPolicy(thin=8.0))
    assert 80 in standing(runner, ids)


def test_engines_whose_capacities_take_other_kernels_do_not_share_an_id(monkeypatch):
    """A kernel that refuses a large pool leaves it to the reference, whose bits are others."""
    monkeypatch.setattr(implementations, "_PREFERRED", {"cpu": ("tpu",)})
    reference = dataclasses.replace(OPTIONS, kernels="reference")

    def tile_step(params, batch, cache, options):
        def by_tpu():
            if jax.tree.leaves(cache.compressed)[0].shape[0] > 64:
                raise NotImplementedError("more than 64 blocks")
            return step()

        def step():
            return RUNTIME.tile_step(params, batch, cache, reference)

        return implementations.first_supported(
            "op", {"tpu": by_tpu, "reference": step}, options.kernels
        )

    model = SimpleNamespace(
        geometry=RUNTIME.geometry, params=RUNTIME.params, tile_step=tile_step, decode_step=None
    )

    def of(tokens):
        capacity = Capacity.for_tokens(RUNTIME.geometry, tokens=tokens, slots=1)
        return numerics_id(model, OPTIONS, capacity)

    block = RUNTIME.geometry.block_tokens
    assert of(8 * block) == of(60 * block) == numerics_id(model, OPTIONS)
    assert of(100 * block) == of(200 * block) != of(8 * block)

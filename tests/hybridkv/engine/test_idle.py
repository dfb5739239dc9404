"""What becomes of generated tokens: computed again in idle time, published as they are, or not."""

import numpy as np
import pytest
from engines import SLOTS, TILE, ids_of, same, task_of

from hybridkv.blocks.entries import Form
from hybridkv.engine.generated import GeneratedBlocks, Publish
from hybridkv.engine.requests import Finish
from hybridkv.engine.scheduler import Stage
from hybridkv.prefixes.policy import DENSE, NEVER

PROMPT, NEW = ids_of(2 * TILE + 5, seed=1), 3 * TILE
WHOLE = (len(PROMPT) + NEW) // TILE * TILE
"""Tokens of a turn in whole tiles."""


def next_prompt(output, seed=9):
    return np.concatenate([PROMPT, np.array(output.tokens, np.int32), ids_of(6, seed=seed)])


def turn(lab, ids=PROMPT, new=NEW, **more):
    output = lab.submit(ids, new, **more).result()
    assert output.finish is Finish.LENGTH
    return output


def test_the_next_turn_reuses_generated_tokens_and_has_the_bits_of_a_cold_run(lab):
    first = lab.alone(PROMPT, NEW)
    ids = next_prompt(first)
    alone = lab.alone(ids, 8)
    assert turn(lab).tokens == first.tokens
    lab.engine.drain()
    use = lab.engine.generated_use
    assert (use.published, use.used) == (WHOLE - 2 * TILE, 0)
    second = turn(lab, ids, 8)
    assert second.reused == WHOLE
    assert second.exact
    assert same(second, alone)
    assert (use.published, use.used, use.wasted) == (WHOLE - 2 * TILE, WHOLE - 2 * TILE, 0)


def test_it_is_given_up_when_a_prompt_needs_its_slot_and_goes_on_later(lab):
    prompts = [ids_of(20, seed=30 + i) for i in range(SLOTS)]
    alone = [lab.alone(ids, 4) for ids in prompts]
    first = turn(lab)
    lab.steps(2)
    assert lab.engine._idle.holds_room
    counters = lab.engine._idle.counters
    computed = counters.computed
    handles = [lab.submit(ids, 4) for ids in prompts]
    lab.steps(1)
    # The one turn seats all of them: nothing goes ahead of what was asked for.
    assert all(task_of(h).stage is not Stage.WAITING for h in handles)
    assert counters.interruptions == 1
    lab.finish(*handles)
    assert counters.computed == computed
    assert all(same(h.output, one) for h, one in zip(handles, alone, strict=True))
    lab.engine.drain()
    use = lab.engine.generated_use
    assert use.published == WHOLE - 2 * TILE
    assert use.used == 0, "no prompt has found any: it was the work itself that went on from it"
    assert turn(lab, next_prompt(first), 2).reused == WHOLE
    assert use.used == WHOLE - 2 * TILE


def test_it_is_given_up_when_a_prompt_needs_its_room(lab):
    turn(lab)
    lab.steps(1)
    assert lab.engine._idle.holds_room
    big = [lab.submit(ids_of(180, seed=i), 8) for i in (4, 5)]
    lab.steps(1)
    assert [task_of(h).stage for h in big] == [Stage.PREFILLING] * 2
    assert lab.engine._idle.counters.interruptions == 1
    lab.finish(*big)


def test_it_runs_only_while_nothing_else_does(lab):
    turn(lab)
    handle = lab.submit(ids_of(30, seed=4), 9)
    lab.finish(handle)
    assert lab.engine._idle.counters.computed == 0
    assert lab.engine.step()
    assert lab.engine._idle.counters.computed > 0


def test_what_a_prompt_computed_first_is_not_computed_again(lab):
    first = turn(lab)
    second = turn(lab, next_prompt(first), 1)
    assert second.reused < WHOLE
    lab.engine.drain()
    assert lab.engine._idle.counters.overtaken == 1


def test_what_does_not_fill_a_tile_is_not_queued(lab):
    turn(lab, ids_of(TILE, seed=1), TILE - 1)
    assert not lab.engine._idle.pending
    turn(lab, ids_of(TILE, seed=2), TILE)
    assert lab.engine._idle.pending


@pytest.mark.parametrize("policy", [None, NEVER], ids=["snapshots", "no snapshots"])
def test_as_decoded_is_there_at_once_and_says_it_is_not_exact(lab, policy):
    first = turn(lab, publish=Publish.AS_DECODED, policy=policy)
    assert (first.publish, first.exact) == (Publish.AS_DECODED, True)
    assert not lab.engine._idle.pending
    whole = (len(PROMPT) + NEW - 1) // TILE * TILE  # the last token was never consumed
    use = lab.engine.generated_use
    assert use.published == whole - 2 * TILE
    second = turn(lab, next_prompt(first), 8)
    assert second.reused == whole
    assert not second.exact
    assert use.used == whole - 2 * TILE
    # And whoever goes on from that one is not exact either.
    third = np.concatenate([next_prompt(first), np.array(second.tokens), ids_of(3)])
    assert not turn(lab, third.astype(np.int32), 2).exact
    # A prompt that shares only what tile steps made is.
    assert turn(lab, np.concatenate([PROMPT[: 2 * TILE + 1], ids_of(9)]), 2).exact


def test_a_snapshot_of_decode_steps_on_blocks_of_tile_steps_is_not_exact(lab):
    """Somebody computes the same tokens as a prompt and leaves no snapshot where this one does."""
    first = lab.alone(PROMPT, NEW)
    tokens = np.concatenate([PROMPT, np.array(first.tokens, np.int32)])
    probe_ids = np.concatenate([tokens[: 3 * TILE], ids_of(7, seed=5)])
    alone = lab.alone(probe_ids, 6)
    running = lab.submit(PROMPT, NEW, publish=Publish.AS_DECODED)
    lab.until(lambda: len(running.output.pieces) == TILE)
    turn(lab, tokens[:-1], 1, policy=NEVER)
    lab.finish(running)
    output = turn(lab, probe_ids, 6)
    assert output.reused + output.computed == len(probe_ids)
    assert not output.exact
    assert not same(output, alone)  # else this shows nothing
    # It is the state that is not that of a cold run; the blocks under it are.
    everything_but_blocks = lab.engine.runner.allocator.evictable(Form.SNAPSHOT)
    lab.engine.runner.allocator.evict(snapshots=everything_but_blocks)
    again = turn(lab, np.concatenate([probe_ids, ids_of(1)]), 6)
    assert again.reused + again.replayed > 0
    assert again.exact


def test_prompt_blocks_of_one_that_is_not_exact_stay_marked_when_published_late(lab):
    """Parked, its prompt's blocks evicted meanwhile, and published again as decoded."""
    first = turn(lab, publish=Publish.AS_DECODED)
    ids = next_prompt(first)
    low = lab.submit(ids, 20, publish=Publish.AS_DECODED)
    lab.until(lambda: len(low.output.pieces) == 3)
    assert not low.output.exact
    lab.engine.seating.preempt(task_of(low))
    everything(lab)
    lab.finish(low)
    again = turn(lab, np.concatenate([ids, ids_of(3, seed=8)]), 2)
    assert again.reused > 0
    assert not again.exact


def test_never_is_computed_by_the_next_turn(lab):
    first = turn(lab, publish=Publish.NEVER)
    assert not lab.engine._idle.pending
    lab.engine.drain()
    second = turn(lab, next_prompt(first), 2)
    assert second.reused == 2 * TILE
    assert second.exact
    use = lab.engine.generated_use
    assert (use.published, use.used, use.wasted) == (0, 0, 0)


def test_generated_blocks_that_go_before_anybody_finds_them_are_wasted(lab):
    turn(lab)
    lab.engine.drain()
    use = lab.engine.generated_use
    everything(lab)
    assert (use.used, use.wasted) == (0, WHOLE - 2 * TILE)
    assert turn(lab, PROMPT, 1).exact


def test_entries_that_are_taken_again_lose_their_marks(lab):
    turn(lab, publish=Publish.AS_DECODED, policy=DENSE)
    marks: GeneratedBlocks = lab.engine.runner.publisher.generated
    assert marks._inexact
    everything(lab)
    assert not marks._inexact
    assert not marks._unused


def everything(lab):
    """Evicts all blocks."""
    allocator = lab.engine.runner.allocator
    allocator.evict(blocks=allocator.evictable(Form.BLOCK))


@pytest.mark.parametrize("how", ["cancelled", "timed out"])
def test_the_tokens_of_one_that_was_broken_off_are_not_queued(lab, how):
    handle = lab.submit(PROMPT, NEW, timeout_s=5.0)
    lab.until(lambda: len(handle.output.pieces) == NEW - 1)
    if how == "cancelled":
        handle.cancel()
    lab.time.now += 5.0
    lab.steps(1)
    assert handle.done
    assert not lab.engine._idle.pending


def test_a_request_may_choose_otherwise_than_its_engine(lab):
    lab.change(publish=Publish.NEVER)
    assert turn(lab).publish is Publish.NEVER
    assert turn(lab, publish=Publish.CANONICAL).publish is Publish.CANONICAL
    assert lab.engine._idle.pending

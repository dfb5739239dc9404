"""The queue, by hand: a server whose tile takes 1 s and whose decode step takes 0.1 s."""

import dataclasses

import numpy as np
import pytest

from hybridkv.arithmetic import cdiv
from hybridkv.blocks.entries import Tier
from hybridkv.errors import UserError
from hybridkv.replay.queueing import QueueOptions, Work, simulate


@dataclasses.dataclass
class Fixed:
    """What the queue asks a server."""

    tile: int = 10
    step: float = 0.1
    slope: float = 0.0
    device: float = 1e9

    @property
    def room(self):
        return {Tier.DEVICE: self.device}

    def tiles_seconds(self, start, count):
        return count * (1.0 + self.slope * (start + self.tile * count / 2))

    def prompt_seconds(self, start, tokens):
        return self.tiles_seconds(start, cdiv(tokens - start, self.tile))

    def decode_seconds(self, sequences, context):
        return self.step if sequences else 0.0

    def move_seconds(self, tier, size):
        return size / {Tier.HOST: 100.0, Tier.DISK: 10.0}[tier]


def work(*rows, **others):
    """Rows of (arrival, prompt, start, output)."""
    arrival, prompt, start, output = (np.asarray(column) for column in zip(*rows, strict=True))
    zeros = np.zeros(len(rows), np.int64)
    fields = {"host_bytes": zeros, "disk_bytes": zeros, "running_bytes": zeros}
    fields |= {name: np.asarray(value) for name, value in others.items()}
    return Work(
        arrival=arrival.astype(np.float64), prompt=prompt, start=start, output=output, **fields
    )


def test_prompts_wait_for_those_before_them():
    times = simulate(Fixed(), QueueOptions(), work((0, 30, 0, 1), (1, 20, 10, 1), (9, 10, 0, 1)))
    assert times.first_token.tolist() == [3.0, 3.0, 1.0]
    assert times.alone.tolist() == [3.0, 1.0, 1.0]
    assert times.busy == times.computing == 5.0
    assert times.span == 10.0


def test_decode_steps_share_turns_with_tiles():
    options = QueueOptions(tiles_per_turn=2)
    times = simulate(Fixed(), options, work((0, 10, 0, 4), (0, 40, 0, 1)))
    # The first decodes from 1.0 on; each two tiles of the second take a decode step along.
    assert times.first_token == pytest.approx([1.0, 1.0 + 4 + 2 * 0.1])
    # Of its three further tokens the last comes when the prompts are done.
    assert times.end[0] == pytest.approx(1.0 + 4 + 3 * 0.1)
    assert times.computing == pytest.approx(5.0)


def test_tokens_of_one_answer_come_a_step_apart():
    times = simulate(Fixed(), QueueOptions(), work((0, 10, 0, 11)))
    assert times.end[0] - times.first_token[0] == pytest.approx(10 * 0.1)


def test_what_does_not_fit_waits_and_what_never_fits_is_refused():
    server = Fixed(device=10.0)
    rows = ((0, 10, 0, 1), (0, 10, 0, 1), (0, 10, 0, 1))
    times = simulate(server, QueueOptions(), work(*rows, running_bytes=[6, 11, 6]))
    assert times.refused.tolist() == [False, True, False]
    assert times.admitted[[0, 2]].tolist() == [0.0, 1.0]
    assert np.isnan(times.first_token[1])
    assert times.first_token[2] == 2.0


def test_loads_of_a_tier_follow_each_other_and_let_ready_prompts_pass():
    rows = ((0, 10, 0, 1), (0, 10, 0, 1), (0, 10, 0, 1))
    times = simulate(Fixed(), QueueOptions(), work(*rows, disk_bytes=[50, 20, 0]))
    # 5 s, then 2 s, of the one disk; the third needs none.
    assert times.first_token.tolist() == [6.0, 8.0, 1.0]
    assert times.alone.tolist() == [6.0, 3.0, 1.0]


def test_slots_bound_what_runs_together():
    rows = ((0, 10, 0, 21), (0, 10, 0, 1))
    times = simulate(Fixed(), QueueOptions(slots=1), work(*rows))
    assert times.most_running == 1
    assert times.first_token[1] == pytest.approx(1.0 + 20 * 0.1 + 1.0)


def test_tiles_far_into_a_context_take_longer():
    times = simulate(Fixed(slope=0.1), QueueOptions(), work((0, 20, 0, 1), (0, 20, 10, 1)))
    assert times.alone.tolist() == [2 * (1 + 0.1 * 10), 1 + 0.1 * 15]
    assert times.first_token[0] == times.alone[0]


def test_a_higher_rate_brings_requests_together():
    rows = ((0, 10, 0, 1), (4, 10, 0, 1))
    assert simulate(Fixed(), QueueOptions(), work(*rows)).first_token.tolist() == [1.0, 1.0]
    times = simulate(Fixed(), QueueOptions(rate=8.0), work(*rows))
    assert times.first_token.tolist() == [1.0, 1.5]


def test_work_is_conserved_whatever_the_order():
    rng = np.random.default_rng(0)
    count = 200
    prompt = rng.integers(1, 90, count)
    arrival, output = np.sort(rng.random(count) * 300), rng.integers(0, 30, count)
    rows = zip(arrival, prompt, prompt * 0, output, strict=True)
    server, options = Fixed(), QueueOptions(slots=5, tiles_per_turn=3)
    times = simulate(server, options, work(*rows))
    assert times.computing == pytest.approx(sum(cdiv(int(p), 10) for p in prompt))
    assert (times.first_token >= times.alone - 1e-9).all()
    assert (times.end >= times.first_token).all()
    assert times.most_running == 5


@pytest.mark.parametrize("fields", [{"slots": 0}, {"tiles_per_turn": 0}, {"rate": 0.0}])
def test_options_that_mean_nothing_are_refused(fields):
    with pytest.raises(UserError):
        QueueOptions(**fields)

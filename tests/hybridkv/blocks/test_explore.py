import pytest

from hybridkv.blocks import eviction
from hybridkv.blocks.allocator import Allocator
from hybridkv.blocks.entries import Form, Tier
from hybridkv.blocks.explore import SIZES, Exploration, explore
from hybridkv.blocks.invariants import InvariantError
from hybridkv.blocks.pools import PoolSizes
from hybridkv.blocks.transitions import TierState

SMALL = {
    Tier.DEVICE: PoolSizes(blocks=1, snapshots=1),
    Tier.HOST: PoolSizes(blocks=1, snapshots=0),
}


def small():
    return explore(SMALL, ids=2)


def test_a_small_world_is_explored_completely_and_its_numbers_are_stable():
    assert small() == Exploration(states=286, transitions=1251, refused=3833, complete=True)


def test_the_world_has_all_three_tiers_two_blocks_and_a_snapshot():
    assert set(SIZES) == set(Tier)
    assert SIZES[Tier.DEVICE] == PoolSizes(blocks=2, snapshots=1)


def test_a_limit_leaves_it_incomplete():
    assert not explore(SMALL, ids=2, limit=5).complete


def test_it_tells_its_progress():
    told = []
    explore(SMALL, ids=2, progress=lambda *now: told.append(now))
    assert told
    assert told[0][0] > told[0][1] > 0


def test_an_eviction_that_ignores_leases_is_found(monkeypatch):
    def idle(entries, tier, form):
        return (
            entries.published & (entries.state[tier] == TierState.PRESENT) & (entries.form == form)
        )

    monkeypatch.setattr(eviction, "_idle", idle)
    with pytest.raises(InvariantError) as found:
        small()
    (note,) = found.value.__notes__
    assert note.startswith("after: reserve(")
    assert "attach(" in note


def test_a_place_that_is_freed_twice_is_found(monkeypatch):
    clear = Allocator._clear

    def twice(self, tier, ids):
        places = self.entries.place[tier, ids].copy()
        clear(self, tier, ids)
        if tier == Tier.DEVICE and len(self.pools[tier][Form.BLOCK].places) == 0:
            self.pools[tier][Form.BLOCK].places.push(places)

    monkeypatch.setattr(Allocator, "_clear", twice)
    with pytest.raises((InvariantError, AssertionError)):
        small()


def test_a_call_that_fails_half_way_is_found(monkeypatch):
    reserve = Allocator.reserve

    def hasty(self, *, blocks=0, snapshots=0, tier=Tier.DEVICE):
        self.entries.hits += 1
        return reserve(self, blocks=blocks, snapshots=snapshots, tier=tier)

    monkeypatch.setattr(Allocator, "reserve", hasty)
    with pytest.raises(InvariantError, match="refused event changed"):
        small()

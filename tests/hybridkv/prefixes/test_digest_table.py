import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hybridkv.blocks.entries import Entries
from hybridkv.prefixes.digest_table import ABSENT, DigestTable


def random_digests(n, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (n, 32), dtype=np.uint8)


def ids(*values):
    return np.array(values, np.int32)


def test_what_was_inserted_is_found_and_nothing_else():
    digests = random_digests(100)
    table = DigestTable(100, digests)
    assert table.insert(np.arange(0, 100, 2)).all()
    assert len(table) == 50
    found = table.find(digests)
    assert found.dtype == np.int32
    assert found.tolist() == [i if i % 2 == 0 else ABSENT for i in range(100)]
    assert (table.find(random_digests(100, seed=1)) == ABSENT).all()


def test_empty_batches_are_fine():
    table = DigestTable(4, random_digests(4))
    assert table.find(np.empty((0, 32), np.uint8)).shape == (0,)
    assert table.insert(ids()).shape == (0,)
    table.remove(ids())
    assert len(table) == 0


def test_what_was_removed_is_absent_and_the_rest_stays():
    digests = random_digests(64)
    table = DigestTable(64, digests)
    table.insert(np.arange(64))
    table.remove(np.arange(0, 64, 3))
    assert table.find(digests).tolist() == [i if i % 3 else ABSENT for i in range(64)]
    assert table.insert(np.arange(0, 64, 3)).all()
    assert table.find(digests).tolist() == list(range(64))


@pytest.mark.parametrize("byte", range(32))
def test_every_byte_of_a_digest_is_compared(byte):
    digests = np.zeros((2, 32), np.uint8)
    digests[1, byte] = 128
    table = DigestTable(2, digests)
    table.insert(ids(0))
    assert table.find(digests).tolist() == [0, ABSENT]
    assert table.insert(ids(1)).tolist() == [True]
    assert table.find(digests).tolist() == [0, 1]


def test_an_equal_digest_is_not_entered():
    digests = random_digests(4)
    digests[1] = digests[3] = digests[0]
    table = DigestTable(4, digests)
    assert table.insert(ids(0)).tolist() == [True]
    assert table.insert(ids(1, 2, 0)).tolist() == [False, True, False]
    assert table.find(digests).tolist() == [0, 0, 2, 0]
    assert len(table) == 2


def test_of_equal_digests_in_one_call_the_first_is_entered():
    digests = random_digests(4)
    digests[2] = digests[1]
    table = DigestTable(4, digests)
    assert table.insert(ids(3, 2, 1, 3)).tolist() == [True, True, False, False]
    assert table.find(digests).tolist() == [ABSENT, 2, 2, 3]
    assert len(table) == 2


def test_equal_digests_meet_where_something_was_removed():
    digests = np.zeros((4, 32), np.uint8)
    digests[:3, 31] = [1, 2, 3]
    digests[3] = digests[2]
    table = DigestTable(4, digests)
    table.insert(ids(0, 1))
    table.remove(ids(0))
    assert table.insert(ids(2, 3)).tolist() == [True, False]
    assert table.find(digests).tolist() == [ABSENT, 1, 2, 2]


def test_removing_what_is_not_there_changes_nothing():
    digests = random_digests(8)
    table = DigestTable(8, digests)
    table.insert(ids(1, 2))
    for wrong in (ids(1, 5), ids(2, 1, 2)):
        with pytest.raises(KeyError):
            table.remove(wrong)
    assert table.find(digests)[[1, 2]].tolist() == [1, 2]
    assert len(table) == 2


def test_more_than_the_capacity_is_refused_whole():
    digests = random_digests(8)
    table = DigestTable(3, digests)
    table.insert(ids(0, 1))
    with pytest.raises(ValueError, match="room for 1 more"):
        table.insert(ids(2, 3))
    assert table.insert(ids(0, 1, 2)).tolist() == [False, False, True]


@pytest.mark.parametrize("wrong", [-1, 8])
def test_ids_without_a_digest_are_refused(wrong):
    table = DigestTable(8, random_digests(8))
    with pytest.raises(ValueError, match=r"ids must be in 0\.\.7"):
        table.insert(ids(0, wrong))
    with pytest.raises(ValueError, match=r"ids must be in 0\.\.7"):
        table.remove(ids(wrong))


def test_other_arrays_than_digests_are_refused():
    with pytest.raises(ValueError, match="uint8"):
        DigestTable(4, np.zeros((4, 32), np.int8))
    with pytest.raises(ValueError, match="at least 1"):
        DigestTable(0, random_digests(4))


def test_digests_that_agree_in_what_the_probing_reads_stay_right():
    digests = random_digests(500)
    digests[:, :16] = 7
    table = DigestTable(500, digests)
    assert table.insert(np.arange(500)).all()
    assert table.find(digests).tolist() == list(range(500))
    table.remove(np.arange(0, 500, 2))
    assert table.find(digests).tolist() == [i if i % 2 else ABSENT for i in range(500)]


def test_digests_with_equal_low_bits_stay_right():
    digests = random_digests(2000)
    digests[:, :3] = 0
    digests[:, 8:11] = 0
    table = DigestTable(2000, digests)
    assert table.insert(np.arange(2000)).all()
    assert table.find(digests).tolist() == list(range(2000))


def test_a_full_table_that_turns_over_for_long_stays_right():
    digests = random_digests(300)
    table = DigestTable(100, digests)
    live = np.arange(100)
    table.insert(live)
    rng = np.random.default_rng(2)
    for _ in range(200):
        out = rng.choice(live, 30, replace=False)
        table.remove(out)
        rest = np.setdiff1d(live, out)
        new = rng.choice(np.setdiff1d(np.arange(300), rest), 30, replace=False)
        assert table.insert(new).all()
        live = np.concatenate([rest, new])
        expected = np.full(300, ABSENT)
        expected[live] = live
        assert table.find(digests).tolist() == expected.tolist()


class AgainstADict(RuleBasedStateMachine):
    """Digests of few distinct values, so that equal ones and shared probe words are common."""

    def __init__(self):
        super().__init__()
        self.digests = np.zeros((24, 32), np.uint8)
        self.table = DigestTable(9, self.digests)
        self.model = {}

    batches = st.lists(st.integers(0, 23), max_size=9)

    @rule(entry=st.integers(0, 23), words=st.tuples(*[st.integers(0, 2)] * 4))
    def set_digest(self, entry, words):
        if entry not in self.model.values():
            self.digests[entry] = np.array(words, np.uint64).view(np.uint8)

    @rule(batch=batches)
    def insert(self, batch):
        after, expected = dict(self.model), []
        for entry in batch:
            key = self.digests[entry].tobytes()
            expected.append(key not in after)
            after.setdefault(key, entry)
        if len(after) > 9:
            with pytest.raises(ValueError, match="room"):
                self.table.insert(ids(*batch))
        else:
            assert self.table.insert(ids(*batch)).tolist() == expected
            self.model = after

    @rule(batch=batches)
    def remove(self, batch):
        if len(set(batch)) < len(batch) or not set(batch) <= set(self.model.values()):
            with pytest.raises(KeyError):
                self.table.remove(ids(*batch))
        else:
            self.table.remove(ids(*batch))
            self.model = {k: v for k, v in self.model.items() if v not in batch}

    @invariant()
    def finds_the_same(self):
        expected = [self.model.get(digest.tobytes(), ABSENT) for digest in self.digests]
        assert self.table.find(self.digests).tolist() == expected
        assert len(self.table) == len(self.model)


TestAgainstADict = AgainstADict.TestCase
TestAgainstADict.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None, derandomize=True
)


@pytest.mark.parametrize("count", [1_000, 2**17, 2**17 + 1, 1_000_000])
def test_an_entry_costs_at_most_200_bytes_with_its_slots(count):
    entries = Entries(count)
    table = DigestTable(count, entries.digest)
    assert table.nbytes <= 20 * count
    assert entries.nbytes + table.nbytes <= 200 * count

import itertools

import numpy as np
import pytest

from hybridkv.blocks.entries import (
    FORM_BITS,
    KIND_BITS,
    NONE,
    Entries,
    Form,
    Tier,
    kind_bits,
    kinds_of,
)
from hybridkv.kinds import Kind


@pytest.mark.parametrize("count", range(5))
def test_bits_and_kinds_are_inverse(count):
    for kinds in itertools.combinations(KIND_BITS, count):
        assert kinds_of(kind_bits(kinds)) == kinds


def test_bits_are_those_of_the_design():
    assert dict(KIND_BITS) == {
        Kind.COMPRESSED: 1,
        Kind.INDEXER: 2,
        Kind.WINDOW: 4,
        Kind.TAIL: 8,
    }
    assert dict(FORM_BITS) == {Form.BLOCK: 3, Form.SNAPSHOT: 12}


@pytest.mark.parametrize("bits", [-1, 16, 255])
def test_bits_of_no_kind_are_refused(bits):
    with pytest.raises(ValueError, match="stand for no kind"):
        kinds_of(bits)


def test_a_kind_that_no_entry_holds_is_refused():
    others = [kind for kind in Kind if kind not in KIND_BITS]
    for kind in others:
        with pytest.raises(ValueError, match=f"no entry holds {kind.name}"):
            kind_bits([kind])


def test_new_entries_are_absent_everywhere_and_linked_to_nothing():
    entries = Entries(4)
    assert len(entries) == 4
    assert entries.state.shape == entries.place.shape == (len(Tier), 4)
    assert not entries.state.any()
    for column in (entries.place, entries.parent, entries.snapshot):
        assert (column == NONE).all()
    for column in (entries.leases, entries.generation, entries.children, entries.published):
        assert not column.any()


def test_columns_have_the_dtypes_of_the_design():
    dtypes = {name: column.dtype.name for name, column in Entries(1).columns()}
    assert (
        dtypes.items()
        >= {
            "form": "uint8",
            "kinds": "uint8",
            "state": "uint8",
            "place": "int32",
            "generation": "uint32",
            "leases": "int32",
            "published": "bool",
            "parent": "int32",
            "children": "int32",
            "snapshot": "int32",
            "position": "int32",
            "digest": "uint8",
            "fingerprint": "uint64",
            "used": "float64",
            "hits": "float32",
            "picks": "float32",
        }.items()
    )


def test_an_entry_costs_at_most_150_bytes_whatever_their_number():
    assert Entries(10).bytes_per_entry == Entries(1000).bytes_per_entry <= 150
    assert Entries(10).nbytes == 10 * Entries(10).bytes_per_entry
    assert Entries(0).bytes_per_entry == 0
    assert all(isinstance(column, np.ndarray) for _, column in Entries(3).columns())

import dataclasses

import numpy as np
import pytest
from geometries import FLASH, HOMOGENEOUS, ODD_BYTES, PRO, V41, toy_geometry

from hybridkv import formats
from hybridkv.errors import UserError
from hybridkv.kinds import Kind
from hybridkv.prefixes.checks import (
    Conditions,
    Intersection,
    block_granularity,
    byte_alignment,
    intersection,
    kernel_interface,
)
from hybridkv.prefixes.identity import Identity

TOY = toy_geometry()


@pytest.mark.parametrize(
    ("tokens", "limit"), [(0, 0), (1, 0), (16, 0), (17, 16), (32, 16), (33, 32), (48, 32)]
)
def test_a_resume_position_is_a_tile_boundary_before_the_last_token(tokens, limit):
    assert block_granularity(TOY, tokens, 16) == limit


def conditions(positions, blocks, snapshots):
    n = len(positions)

    def flags(held):
        return np.isin(positions, held) if held is not None else np.zeros(n, bool)

    return Conditions(
        positions=np.asarray(positions, int),
        blocks={kind: flags(held) for kind, held in blocks.items()},
        snapshots={kind: flags(held) for kind, held in snapshots.items()},
    )


def test_the_longest_position_at_which_all_hold_is_searched_not_rounded():
    found = intersection(
        conditions(
            [16, 32, 48, 64],
            {Kind.COMPRESSED: [16, 32, 48, 64], Kind.INDEXER: [16, 32, 48]},
            {Kind.WINDOW: [32, 64], Kind.TAIL: [16, 32, 48, 64]},
        )
    )
    assert found == Intersection(shared=48, snapshot=32)


def test_kinds_that_never_hold_together_give_nothing():
    found = intersection(
        conditions([16, 32], {Kind.COMPRESSED: [16, 32]}, {Kind.WINDOW: [16], Kind.TAIL: [32]})
    )
    assert found == Intersection(shared=32, snapshot=0)
    empty = intersection(conditions([], {Kind.COMPRESSED: []}, {}))
    assert empty == Intersection(shared=0, snapshot=0)


def test_without_state_every_whole_position_is_as_good_as_a_snapshot():
    found = intersection(conditions([16, 32], {Kind.COMPRESSED: [16, 32]}, {}))
    assert found == Intersection(shared=32, snapshot=32)


def test_the_kernel_interface_names_what_differs():
    ours = Identity.of_geometry(TOY, weights="w", numerics="n")
    assert kernel_interface(ours, ours) == ()
    other = dataclasses.replace(TOY, row_format=formats.BFLOAT16)
    theirs = Identity.of_geometry(other, weights="w", numerics="n")
    assert "layout" in kernel_interface(ours, theirs)


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize("geometry", [FLASH, PRO, V41, TOY], ids=["flash", "pro", "v41", "toy"])
def test_published_layouts_are_addressable(geometry, platform):
    byte_alignment(geometry, 1000, platform)


def test_a_misaligned_block_is_refused_with_what_to_do():
    odd = dataclasses.replace(HOMOGENEOUS, row_width=3, row_format=formats.BFLOAT16)
    with pytest.raises(UserError, match=r"1 rows of 6 bytes is no multiple of the 4 .* gpu"):
        byte_alignment(odd, 10, "gpu")


def test_a_block_of_packed_rows_that_is_no_whole_words_is_refused():
    with pytest.raises(
        UserError, match=r"layer 2: a block of 1 rows of 9 bytes .* cells_per_block"
    ):
        byte_alignment(ODD_BYTES, 10, "cpu")
    byte_alignment(dataclasses.replace(ODD_BYTES, cells_per_block=4), 10, "cpu")


def test_more_rows_than_int32_addresses_are_refused():
    with pytest.raises(UserError, match="exceed int32"):
        byte_alignment(FLASH, 2**26, "cpu")


def test_an_unknown_platform_is_refused():
    with pytest.raises(UserError, match="no alignment is known"):
        byte_alignment(TOY, 1, "abacus")

import pytest
from geometries import FLASH, toy_geometry

from hybridkv.state.capacity import Capacity


@pytest.mark.parametrize(
    ("tokens", "blocks"), [(1, 1), (127, 1), (128, 1), (129, 2), (2**20, 8192)]
)
def test_capacity_for_tokens_is_the_fewest_whole_blocks(tokens, blocks):
    capacity = Capacity.for_tokens(FLASH, tokens=tokens, slots=3)
    assert capacity == Capacity(blocks=3 * blocks, slots=3, blocks_per_sequence=blocks)
    assert capacity.tokens(FLASH) == 128 * blocks


@pytest.mark.parametrize("field", ["blocks", "slots", "blocks_per_sequence"])
def test_an_empty_capacity_is_refused(field):
    sizes = {"blocks": 1, "slots": 1, "blocks_per_sequence": 1} | {field: 0}
    with pytest.raises(ValueError, match=f"^{field} must be at least 1"):
        Capacity(**sizes)


def test_no_tokens_are_no_capacity():
    with pytest.raises(ValueError, match="must be at least 1"):
        Capacity.for_tokens(toy_geometry(), tokens=0)

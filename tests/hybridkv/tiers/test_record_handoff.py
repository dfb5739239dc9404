"""A hand-off is whole or refused, by one line that names the kind."""

import dataclasses
import json

import numpy as np
import pytest
import safetensors.numpy
import xxhash

from hybridkv.kinds import Kind
from hybridkv.prefixes.identity import Identity
from hybridkv.tiers.handoff_record import HandOff, HandOffRefused

BLOCK, COMPUTED = 16, 37
IDENTITY = Identity(geometry="g", weights="w", layout="l", numerics="n", extra=(("adapter", "é"),))
KINDS = (Kind.COMPRESSED, Kind.INDEXER, Kind.WINDOW, Kind.TAIL)


def make(**changes):
    rng = np.random.default_rng(0)
    parts = {
        "identity": IDENTITY,
        "root": IDENTITY.root("tenant"),
        "decode": "alone",
        "tokens": rng.integers(0, 99, COMPUTED + 1).astype(np.uint32),
        "prompt_tokens": 30,
        "computed": COMPUTED,
        "exact": True,
        "block_tokens": BLOCK,
        "block_spans": {Kind.COMPRESSED: slice(0, 12), Kind.INDEXER: slice(12, 17)},
        "state_spans": {Kind.WINDOW: slice(0, 9), Kind.TAIL: slice(9, 20)},
        "blocks": rng.integers(0, 2**32, (3, 17), np.uint32),
        "state": rng.integers(0, 2**32, 20, np.uint32),
    }
    return HandOff.of(**(parts | changes))


HANDOFF = make()
DATA = HANDOFF.to_bytes()


def same(a, b):
    for field in dataclasses.fields(HandOff):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if field.name == "block_checks":
            assert list(x) == list(y)
            x, y = list(x.values()), list(y.values())
        np.testing.assert_equal(x, y)


def taken_apart(data=DATA):
    """Tensors and metadata of the file."""
    size = int.from_bytes(data[:8], "little")
    return dict(safetensors.numpy.load(data)), json.loads(data[8 : 8 + size])["__metadata__"]


def one_replaced():
    """The metadata with a value in it that is no text."""
    metadata = taken_apart()[1]
    return [metadata | {name: value} for name in metadata for value in (5, [], None)]


def refused(data, part=None, kind=None):
    with pytest.raises(HandOffRefused) as caught:
        HandOff.from_bytes(data)
    assert "\n" not in str(caught.value)
    assert part is None or part in str(caught.value)
    assert caught.value.kind is kind
    return str(caught.value)


def test_it_comes_back_as_it_was_and_says_what_it_is():
    back = HandOff.from_bytes(DATA)
    same(back, HANDOFF)
    assert len(back.to_bytes()) == len(DATA)
    assert (len(back.prompt), len(back.generated), len(back.pending)) == (30, 7, 1)
    assert back.nbytes == 4 * (3 * 17 + 20 + 38)


def test_one_in_the_middle_of_its_prompt_has_nothing_generated():
    part = make(tokens=np.arange(60, dtype=np.uint32), prompt_tokens=60)
    assert (len(part.prompt), len(part.generated), len(part.pending)) == (60, 0, 0)
    same(HandOff.from_bytes(part.to_bytes()), part)


def test_a_model_without_state_or_index_has_none_in_its_bytes():
    plain = make(
        block_spans={Kind.COMPRESSED: slice(0, 17)}, state_spans={}, state=np.empty(0, np.uint32)
    )
    back = HandOff.from_bytes(plain.to_bytes())
    same(back, plain)
    assert back.state.shape == (0,)


def test_it_goes_through_a_file(tmp_path):
    path = tmp_path / "sequence.safetensors"
    assert HANDOFF.write(path) == len(DATA)
    same(HandOff.read(path), HANDOFF)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    for wrong in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(HandOffRefused, match="can't read"):
            HandOff.read(wrong)
    with pytest.raises(HandOffRefused, match="can't write"):
        HANDOFF.write(tmp_path / "no folder" / "x")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.value)
def test_a_kind_that_is_missing_is_named(kind):
    tensors, metadata = taken_apart()
    del tensors[kind.value]
    refused(safetensors.numpy.save(tensors, metadata), kind.name, kind)


def test_the_record_itself_may_not_be_missing():
    tensors, metadata = taken_apart()
    refused(safetensors.numpy.save(tensors), "header", Kind.DISK_PREFIX)
    damaged = metadata | {"header": metadata["header"].replace('"exact":true', '"exact":false')}
    refused(safetensors.numpy.save(tensors, damaged), "header", Kind.DISK_PREFIX)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.value)
def test_a_damaged_kind_is_named(kind):
    tensors, metadata = taken_apart()
    tensors[kind.value] = tensors[kind.value].copy()
    tensors[kind.value].reshape(-1)[-1] ^= 1
    line = refused(safetensors.numpy.save(tensors, metadata), kind.name, kind)
    assert ("block 2" in line) == (kind in (Kind.COMPRESSED, Kind.INDEXER))


def test_other_tokens_are_refused():
    tensors, metadata = taken_apart()
    tensors["tokens"] = tensors["tokens"] + np.uint32(1)
    refused(safetensors.numpy.save(tensors, metadata), "tokens")


@pytest.mark.parametrize("name", ["tokens", "compressed", "tail"])
@pytest.mark.parametrize("change", ["longer", "dtype"])
def test_lengths_are_compared_before_anything_is_read(name, change, monkeypatch):
    tensors, metadata = taken_apart()
    x = tensors[name]
    tensors[name] = np.concatenate([x, x]) if change == "longer" else x.view(np.float32)
    data = safetensors.numpy.save(tensors, metadata)
    monkeypatch.setattr(safetensors.numpy, "load", lambda data: pytest.fail("it was read"))
    refused(data, "uint32", None if name == "tokens" else Kind(name))


def test_a_length_that_no_memory_holds_is_refused_and_not_allocated():
    tensors, metadata = taken_apart()
    header = json.loads(metadata["header"]) | {"tokens": 2**47, "computed": 2**47}
    text = json.dumps(header)
    forged = {"header": text, "xxh3_128": xxhash.xxh3_128_hexdigest(text.encode())}
    refused(safetensors.numpy.save(tensors, forged))


@pytest.mark.parametrize("field", sorted(json.loads(taken_apart()[1]["header"])))
@pytest.mark.parametrize("value", [None, -1, "x", [], {"compressed": "x"}], ids=str)
def test_a_header_with_a_right_digest_and_a_wrong_field_is_refused(field, value):
    tensors, metadata = taken_apart()
    text = json.dumps(json.loads(metadata["header"]) | {field: value})
    forged = {"header": text, "xxh3_128": xxhash.xxh3_128_hexdigest(text.encode())}
    data = safetensors.numpy.save(tensors, forged)
    if (field, value) == ("decode", "x"):
        # Any text is one: it only decides whether the receiver says that it is exact.
        assert HandOff.from_bytes(data).decode == "x"
    else:
        refused(data)


@pytest.mark.parametrize("metadata", [{"header": 5, "xxh3_128": "x"}, *one_replaced()])
def test_metadata_that_is_no_text_is_refused(metadata):
    """safetensors writes none, so that its header is made here."""
    size = int.from_bytes(DATA[:8], "little")
    outer = json.loads(DATA[8 : 8 + size]) | {"__metadata__": metadata}
    text = json.dumps(outer).encode()
    data = len(text).to_bytes(8, "little") + text + DATA[8 + size :]
    refused(data, "header", Kind.DISK_PREFIX)


def test_what_ends_early_is_refused_at_every_length():
    for length in (*range(0, 64), *range(64, len(DATA), 97), len(DATA) - 1):
        refused(DATA[:length])
    refused(DATA + b"\0")


def test_every_flipped_bit_is_found():
    rng = np.random.default_rng(0)
    for at in range(len(DATA)):
        flipped = bytearray(DATA)
        flipped[at] ^= 1 << int(rng.integers(8))
        try:
            back = HandOff.from_bytes(bytes(flipped))
        except HandOffRefused:
            continue
        same(back, HANDOFF)  # a blank between the fields of the outer header
        assert flipped[at : at + 1].isspace()


def test_what_is_not_a_hand_off_is_refused(tmp_path):
    for data in (b"", b"x", b"PK\3\4" * 100, bytes(1000), b"\xff" * 1000):
        refused(data)
    refused((5).to_bytes(8, "little") + b"[1,2]")
    refused(safetensors.numpy.save({"a": np.zeros(3)}), "header", Kind.DISK_PREFIX)

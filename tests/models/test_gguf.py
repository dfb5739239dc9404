"""Files of the field's other format: what is read, and what is refused."""

import sys

import gguf
import numpy as np
import pytest

from hybridkv.errors import UserError
from models.files import ConfigError, WeightsError
from models.gguf import open_gguf

RNG = np.random.default_rng(0)
PLAIN = RNG.normal(size=(3, 64)).astype(np.float32)


def write(path, tensors=(), **metadata):
    """Tensors are (name, array, GGUF type or None); two underscores in a key are a dot."""
    writer = gguf.GGUFWriter(path, "toy")
    for key, value in metadata.items():
        add = writer.add_string if isinstance(value, str) else writer.add_uint32
        add(key.replace("__", "."), value)
    for name, value, kind in tensors:
        writer.add_tensor(name, value, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def bfloat16():
    """The upper halves of float32, and what they stand for."""
    bits = PLAIN.view(np.uint32) >> 16
    return bits.astype(np.uint16).view(np.uint8), (bits << 16).view(np.float32)


def q8_0():
    """Blocks of 32: a float16 scale, then int8."""
    scale = RNG.uniform(0.01, 1, (3, 2, 1)).astype(np.float16)
    values = RNG.integers(-128, 128, (3, 2, 32)).astype(np.int8)
    raw = np.concatenate([scale.view(np.uint8), values.view(np.uint8)], axis=-1)
    return raw.reshape(3, -1), (scale.astype(np.float32) * values).reshape(3, 64)


def q4_1():
    """Blocks of 32: float16 step and minimum, then nibbles; the low ones are the first 16."""
    step, least = RNG.uniform(0.01, 1, (2, 3, 2, 1)).astype(np.float16)
    values = RNG.integers(0, 16, (3, 2, 32)).astype(np.uint8)
    nibbles = values[..., :16] | values[..., 16:] << 4
    raw = np.concatenate([step.view(np.uint8), least.view(np.uint8), nibbles], axis=-1)
    wide = step.astype(np.float32) * values + least.astype(np.float32)
    return raw.reshape(3, -1), wide.reshape(3, 64)


@pytest.mark.parametrize(
    ("kind", "stored", "expected"),
    [
        (None, PLAIN, PLAIN),
        (None, PLAIN.astype(np.float16), PLAIN.astype(np.float16).astype(np.float32)),
        ("BF16", *bfloat16()),
        ("Q8_0", *q8_0()),
        ("Q4_1", *q4_1()),
    ],
    ids=["F32", "F16", "BF16", "Q8_0", "Q4_1"],
)
def test_a_tensor_has_the_values_its_bytes_stand_for(tmp_path, kind, stored, expected):
    kind = None if kind is None else gguf.GGMLQuantizationType[kind]
    file = open_gguf(write(tmp_path / "a.gguf", [("a", stored, kind)]))
    value = file.tensors["a"]()
    assert value.dtype == np.float32
    np.testing.assert_array_equal(value, expected)


def test_metadata_is_of_the_kind_that_is_asked_for(tmp_path):
    file = open_gguf(write(tmp_path / "a.gguf", toy__size=3, toy__name="x"))
    assert file.value("toy.size", int) == 3
    assert file.value("toy.size", float) == 3.0
    assert file.value("toy.name", str) == "x"
    assert file.value("toy.none", int, 7) == 7
    for key, kind, message in (
        ("toy.none", int, r"lacks toy\.none"),
        ("toy.name", int, r"toy\.name is 'x': it must be of type int"),
        ("toy.size", bool, "must be of type bool"),
    ):
        with pytest.raises(ConfigError, match=message):
            file.value(key, kind)


def test_a_file_that_ends_early_is_refused_wherever_it_ends(tmp_path):
    tensors = [("a", PLAIN, None), ("b", PLAIN[:, :3].copy(), None)]
    path = write(tmp_path / "a.gguf", tensors, toy__name="x", toy__size=3)
    whole = path.read_bytes()
    end = len(whole.rstrip(b"\0"))
    for length in [*range(0, end - 64, 7), *range(end - 64, end)]:
        path.write_bytes(whole[:length])
        with pytest.raises(WeightsError, match="is not a whole GGUF file") as caught:
            open_gguf(path)
        assert "\n" not in str(caught.value)


def test_what_is_no_single_file_of_this_machine_is_refused(tmp_path):
    (tmp_path / "text.gguf").write_text("not a model at all, but long enough to have a header")
    write(tmp_path / "part.gguf", split__count=3)
    writer = gguf.GGUFWriter(tmp_path / "big.gguf", "toy", endianess=gguf.GGUFEndian.BIG)
    writer.add_uint32("toy.size", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for name, message in (
        ("none.gguf", "no file"),
        ("text.gguf", "is not a whole GGUF file"),
        ("part.gguf", "one of 3 parts"),
        ("big.gguf", "other byte order"),
    ):
        with pytest.raises(WeightsError, match=message):
            open_gguf(tmp_path / name)


def test_a_stored_type_without_a_meaning_as_numbers_is_named(tmp_path):
    tensors = [("a", np.ones((2, 2), np.int32), None)]
    file = open_gguf(write(tmp_path / "a.gguf", tensors))
    with pytest.raises(WeightsError, match="tensor a is stored as I32"):
        file.tensors["a"]()


def test_the_missing_package_is_named_with_the_extra(tmp_path, monkeypatch):
    path = write(tmp_path / "a.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match=r"needs the gguf package: pip install -e '.\[gguf\]'"):
        open_gguf(path)

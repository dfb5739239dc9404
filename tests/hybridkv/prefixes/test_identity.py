import dataclasses
import itertools
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from geometries import FLASH, PRO, SHARED, V41, changed, toy_geometry

from hybridkv import formats
from hybridkv.errors import UserError
from hybridkv.prefixes import identity as module
from hybridkv.prefixes.identity import Identity, weights_digest

PLAIN = Identity(geometry="g", weights="w", layout="l", numerics="n")


def of(geometry, **parts):
    return Identity.of_geometry(geometry, **{"weights": "w", "numerics": "n"} | parts)


def test_roots_are_32_bytes_and_the_same_again():
    assert len(PLAIN.root("a")) == 32
    assert PLAIN.root("a") == dataclasses.replace(PLAIN).root("a")


def test_every_part_and_the_namespace_change_the_root():
    others = [
        dataclasses.replace(PLAIN, **{part: "other"})
        for part in ("geometry", "weights", "layout", "numerics")
    ]
    others += [dataclasses.replace(PLAIN, extra=(("adapter", "x"),))]
    roots = [x.root(name) for x in (PLAIN, *others) for name in ("", "a", "b")]
    assert len(set(roots)) == len(roots)


def test_the_empty_namespace_is_one_of_its_own():
    assert PLAIN.root() == PLAIN.root("")
    assert PLAIN.root("") != PLAIN.root(" ")
    assert PLAIN.root("") != PLAIN.root("\0")


def test_parts_can_not_be_taken_for_one_another():
    def root(namespace="", **parts):
        return dataclasses.replace(PLAIN, **parts).root(namespace)

    roots = [
        root(extra=(("adapter", "X"),)),
        root(extra=(("salt", "X"),)),
        root(extra=(("X", "adapter"),)),
        root("X"),
        root(weights="X"),
        root(extra=(("weights", "X"),)),
        root(extra=(("namespace", "X"),)),
        root(geometry="ab", weights="c"),
        root(geometry="a", weights="bc"),
        root(geometry="abc", weights=""),
        root(extra=(("ab", "c"),)),
        root(extra=(("a", "bc"),)),
        root(extra=(("a", "b"), ("c", "d"))),
        root(extra=(("a", "bcd"),)),
        root("", numerics="n\0"),
    ]
    assert [a == b for a, b in itertools.combinations(roots, 2)].count(True) == 0


def test_extra_parts_are_sorted():
    a, b = ("adapter", "x"), ("salt", "y")
    one, other = (dataclasses.replace(PLAIN, extra=extra) for extra in ((a, b), (b, a)))
    assert one == other
    assert one.extra == (a, b)
    assert one.root() == other.root()


def test_an_extra_part_given_twice_is_refused():
    with pytest.raises(UserError, match="'adapter' is given twice"):
        dataclasses.replace(PLAIN, extra=(("adapter", "x"), ("adapter", "y")))


def test_parts_that_are_no_strings_are_refused():
    with pytest.raises(UserError, match="'weights' is 3: give strings"):
        dataclasses.replace(PLAIN, weights=3)
    with pytest.raises(UserError, match="'adapter' is None"):
        dataclasses.replace(PLAIN, extra=(("adapter", None),))
    with pytest.raises(UserError, match="namespace is None: give a string"):
        PLAIN.root(None)


def test_differences_name_the_parts():
    other = dataclasses.replace(
        PLAIN, weights="v", numerics="m", extra=(("adapter", "x"), ("weights", "y"))
    )
    assert PLAIN.differences(PLAIN) == ()
    expected = ("weights", "numerics", "extra.adapter", "extra.weights")
    assert PLAIN.differences(other) == expected
    assert other.differences(PLAIN) == expected
    assert other.differences(dataclasses.replace(other, extra=())) == expected[2:]


def test_geometries_have_identities_of_their_own():
    roots = {of(x).root() for x in (FLASH, PRO, V41, SHARED, toy_geometry())}
    assert len(roots) == 5


def test_every_true_input_of_a_geometry_is_in_its_identity():
    base = toy_geometry()
    changes = {
        "layers": (dataclasses.replace(base.layers[0], window=9), *base.layers[1:]),
        "row_width": 17,
        "rope_width": 2,
        "index_width": 9,
        "window_format": formats.BFLOAT16,
        "row_format": formats.BFLOAT16,
        "index_format": formats.BFLOAT16,
        "cells_per_block": 2,
    }
    assert set(changes) == {field.name for field in dataclasses.fields(base)}
    roots = {of(changed(base, **{name: value})).root() for name, value in changes.items()}
    assert len(roots | {of(base).root()}) == len(changes) + 1


@pytest.mark.parametrize(
    ("changes", "layout"),
    [
        ({"row_width": 32}, False),
        ({"row_format": formats.BFLOAT16}, True),
        ({"row_format": dataclasses.replace(formats.FLOAT32, align=64)}, True),
        ({"cells_per_block": 2}, True),
    ],
)
def test_the_layout_is_formats_and_block_size(changes, layout):
    base = toy_geometry()
    assert ("layout" in of(base).differences(of(changed(base, **changes)))) is layout


def test_the_layout_version_is_part_of_the_layout(monkeypatch):
    before = of(FLASH)
    monkeypatch.setattr(module, "LAYOUT_VERSION", module.LAYOUT_VERSION + 1)
    assert before.differences(of(FLASH)) == ("layout",)


def test_other_processes_have_the_same_root():
    code = (
        "from geometries import FLASH\n"
        "from hybridkv.prefixes.identity import Identity\n"
        "identity = Identity.of_geometry(FLASH, weights='w', numerics='n')\n"
        "print(identity.root('tenant').hex())"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == of(FLASH).root("tenant").hex()


def test_weights_digest_sees_path_shape_dtype_and_bytes():
    base = np.arange(6, dtype=np.float32)
    digests = [
        weights_digest(x)
        for x in (
            {"a": base},
            {"b": base},
            [base],
            {"a": base.reshape(2, 3)},
            {"a": base.reshape(1, 6)},
            {"a": base.view(np.int32)},
            {"a": base.astype(">f4")},
            {"a": base.astype(np.float64)},
            {"a": base + 1},
            {"a": base[:3], "b": base[3:]},
            {"a": base[:4], "b": base[4:]},
            {"a": np.uint16(3)},
            {"a": np.array(3, np.uint16).view(jnp.bfloat16)},
            {},
        )
    ]
    assert len(set(digests)) == len(digests)
    assert all(len(digest) == 64 for digest in digests)


def test_weights_digest_is_of_values_wherever_they_lie():
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    digest = weights_digest({"b": array, "a": array[0]})
    assert weights_digest({"a": jnp.asarray(array[0]), "b": jnp.asarray(array)}) == digest
    assert weights_digest({"b": np.asfortranarray(array), "a": array[0]}) == digest


def test_weights_digest_of_other_objects_is_refused():
    with pytest.raises(UserError, match=r"weights\['a'\] is object: give a pytree of arrays"):
        weights_digest({"a": object()})

"""Who a prefix belongs to: every input that its bytes depend on besides the tokens.

Two prefixes may share an entry only when all parts are equal; another identity is a miss. The parts
end up in the root of the hash chain, so that no comparison can be forgotten.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from hybridkv.errors import UserError
from hybridkv.geometry import Geometry

LAYOUT_VERSION = 1
"""Counts up whenever the same row formats are packed into other bytes."""

_ROOT_DOMAIN = "hybridkv.prefix.root.1"
_WEIGHTS_DOMAIN = "hybridkv.weights.1"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Identity:
    """What stored bytes depend on besides tokens and namespace; parts are compared as strings."""

    geometry: str
    """What the cache is made of; see ``of_geometry``."""
    weights: str
    """A digest of the parameters; see ``weights_digest``."""
    layout: str
    """How a row becomes bytes."""
    numerics: str
    """What decides the last bit: the lowered step, device kind, mesh, versions, flags."""
    extra: tuple[tuple[str, str], ...] = ()
    """Further (name, value) parts, such as an adapter or the salt of an image. Kept sorted by
    name, so that the order in which they are given does not matter."""

    def __post_init__(self) -> None:
        for name, value in self._parts():
            if not isinstance(name, str) or not isinstance(value, str):
                raise UserError(
                    f"identity part {name!r} is {value!r}: give strings, as in "
                    'Identity(..., extra=(("adapter", "legal-v2"),))'
                )
        names = [name for name, _ in self.extra]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise UserError(f"identity part {twice[0]!r} is given twice in extra: give it once")
        object.__setattr__(self, "extra", tuple(sorted(self.extra)))

    @classmethod
    def of_geometry(
        cls,
        geometry: Geometry,
        *,
        weights: str,
        numerics: str,
        extra: Iterable[tuple[str, str]] = (),
    ) -> "Identity":
        """The identity of a cache of this geometry.

        The geometry part is a text of all of its true inputs; the layout part names the fields of
        the row formats, the tokens of a block and ``LAYOUT_VERSION``.
        """
        layout = {
            "version": LAYOUT_VERSION,
            "block_tokens": geometry.block_tokens,
            "window": dataclasses.asdict(geometry.window_format),
            "row": dataclasses.asdict(geometry.row_format),
            "index": dataclasses.asdict(geometry.index_format),
        }
        return cls(
            geometry=_stable_text(dataclasses.asdict(geometry)),
            weights=weights,
            layout=_stable_text(layout),
            numerics=numerics,
            extra=tuple((name, value) for name, value in extra),
        )

    def root(self, namespace: str = "") -> bytes:
        """SHA-256 (32 bytes) over all parts and the namespace: where a hash chain starts.

        Every part is tagged with its domain and carries its lengths, so that no two different
        identities or namespaces are ever the same bytes. The empty namespace is one of its own.
        """
        if not isinstance(namespace, str):
            raise UserError(f'namespace is {namespace!r}: give a string, as in root("tenant-a")')
        state = hashlib.sha256()
        for field in (_ROOT_DOMAIN, "namespace", "", namespace):
            state.update(_prefixed(field.encode("utf-8", "surrogatepass")))
        for domain, name, value in self._tagged():
            for field in (domain, name, value):
                state.update(_prefixed(field.encode("utf-8", "surrogatepass")))
        return state.digest()

    def differences(self, other: "Identity") -> tuple[str, ...]:
        """Names of the parts that differ, those of ``extra`` as ``extra.<name>``."""
        own, others = dict(self._named()), dict(other._named())
        names = list(own) + [name for name in others if name not in own]
        return tuple(name for name in names if own.get(name) != others.get(name))

    def _tagged(self) -> Iterator[tuple[str, str, str]]:
        """(domain, name, value) of every part; own parts and extra ones have their own domains."""
        for name in ("geometry", "weights", "layout", "numerics"):
            yield "part", name, getattr(self, name)
        for name, value in self.extra:
            yield "extra", name, value

    def _parts(self) -> Iterator[tuple[str, str]]:
        return ((name, value) for _, name, value in self._tagged())

    def _named(self) -> Iterator[tuple[str, str]]:
        for domain, name, value in self._tagged():
            yield (name if domain == "part" else f"extra.{name}"), value


def weights_digest(params: Any) -> str:
    """SHA-256 (hex) over path, shape, dtype and bytes of every array of a pytree.

    Arrays are copied from the device one after the other. About a second for each gigabyte.

    Raises:
      UserError: a leaf is no array of numbers.
    """
    state = hashlib.sha256(_prefixed(_WEIGHTS_DOMAIN.encode()))
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        name = jax.tree_util.keystr(path)
        array = np.asarray(leaf)
        if array.dtype.hasobject:
            raise UserError(f"weights{name} is {type(leaf).__name__}: give a pytree of arrays")
        # .name tells bfloat16 from other types of 2 bytes, .str tells the byte order.
        for field in (name, str(array.shape), array.dtype.name, array.dtype.str):
            state.update(_prefixed(field.encode()))
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        state.update(data.size.to_bytes(8, "little"))
        state.update(data.data)
    return state.hexdigest()


def _prefixed(field: bytes) -> bytes:
    """The field after its length: concatenations can be taken apart in one way only."""
    return len(field).to_bytes(8, "little") + field


def _stable_text(value: Any) -> str:
    """JSON with sorted names and no spaces: equal values have equal texts in every process."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))

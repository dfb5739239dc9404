"""``store.json``: what a store is, written once when it is made and checked whenever it is opened.

folder   missing or empty --make--> store.json (checksummed) --read--> Header --accept--> open
"""

import dataclasses
import pathlib
from typing import Any

from hybridkv.kinds import Kind
from hybridkv.prefixes.identity import Identity
from hybridkv.tiers.store import json as store_json
from hybridkv.tiers.store.folder import Folder, one_line
from hybridkv.tiers.store.manifest import MANIFESTS, SEGMENTS, SNAPSHOTS
from hybridkv.tiers.store.records import StoreError, StoreLayout, needed_kinds

FORMAT = "hybridkv.store"
STORE_VERSION = 1
"""Counts up whenever files of a store mean something else."""
FILE = "store.json"
LOCK = "writer.lock"
_MOST_BYTES = 16 * 2**20
UNFINISHED = f"{FILE}.__lock"
"""What TensorStore leaves of a ``FILE`` that was being written when the process died."""
_OWN = {FILE, LOCK, UNFINISHED, MANIFESTS, SEGMENTS, SNAPSHOTS}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Header:
    """What a store is."""

    identity: Identity
    layout: StoreLayout
    capacity_bytes: int | None
    """Bytes of all files of the store together; None for as many as the disk has."""

    @property
    def digest(self) -> str:
        """Root of the identity's empty namespace, in hexadecimal: it stands in every manifest."""
        return self.identity.root().hex()

    def encode(self) -> bytes:
        """The file's bytes."""
        identity = dataclasses.asdict(self.identity) | {"digest": self.digest}
        return store_json.encode(
            {
                "format": FORMAT,
                "version": STORE_VERSION,
                "identity": identity,
                "layout": self.layout.to_json(),
                "capacity_bytes": self.capacity_bytes,
            }
        )


def decode(data: bytes) -> Header:
    """The inverse of ``Header.encode``.

    Raises:
      ValueError: the file is damaged, of another version or says something else; with a reason.
    """
    body = store_json.decode(data)
    if body.get("format") != FORMAT:
        raise ValueError("it is not a store's")
    if body.get("version") != STORE_VERSION:
        raise ValueError(f"it has version {body.get('version')!r}, not {STORE_VERSION}")
    try:
        parts = dict(body["identity"])
        digest = parts.pop("digest")
        extra = tuple((name, value) for name, value in parts.pop("extra"))
        header = Header(
            identity=Identity(extra=extra, **parts),
            layout=StoreLayout.from_json(body["layout"]),
            capacity_bytes=_capacity(body["capacity_bytes"]),
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"a field is missing or wrong ({one_line(error)})") from None
    if digest != header.digest:
        raise ValueError("its identity does not have its digest")
    return header


def read(folder: Folder) -> Header | None:
    """The header of a store; None when the folder is missing or empty.

    Raises:
      StoreError: the folder is not a store, of another version, damaged or can't be read.
    """
    return parse(read_bytes(folder), folder.path)


def read_bytes(folder: Folder) -> bytes | None:
    """Bytes of ``store.json``; None when the folder is missing or empty.

    Raises:
      StoreError: the folder is not a store, or can't be read.
    """
    path = folder.path
    try:
        names = {entry.name for entry in path.iterdir()}
        if FILE in names:
            return folder.read(FILE, _MOST_BYTES)
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        raise StoreError(f"{path} is a file: give the folder of a store") from None
    except (OSError, ValueError) as error:
        raise StoreError(f"can't read the store {path} ({one_line(error)}): mend that") from error
    # Nothing is below these before there is a FILE, so they are somebody else's or half a store.
    if names - _OWN or any(map(folder.subfolders, (MANIFESTS, SEGMENTS, SNAPSHOTS))):
        raise StoreError(
            f"{path} is not a prefix store (it has no {FILE}): give the folder of a store, or an "
            "empty one to make a new one"
        )
    return None


def parse(data: bytes | None, path: pathlib.Path) -> Header | None:
    """``decode`` with the path in the error, which is a StoreError."""
    if data is None:
        return None
    try:
        return decode(data)
    except ValueError as error:
        raise StoreError(
            f"{path / FILE} can't be used: {error}; make a new store in an empty folder (what is "
            "stored here can't be converted, only computed again)"
        ) from None


def accept(header: Header, identity: Identity, layout: StoreLayout, path: pathlib.Path) -> None:
    """Whether a store is for this identity and layout; its own ``segment_blocks`` stands.

    Raises:
      StoreError: it is not, with the parts that differ.
    """
    differences = header.identity.differences(identity)
    if differences:
        raise StoreError(
            f"the store {path} belongs to another identity ({', '.join(differences)} differ): "
            "give an empty folder for this one"
        )
    for name in ("block_spans", "snapshot_spans", "block_tokens"):
        stored, asked = getattr(header.layout, name), getattr(layout, name)
        if stored == asked:
            continue
        missing = set(asked) - set(stored) if isinstance(asked, dict) else set()
        what = f"no {_names(missing)}" if missing else f"other {name}"
        raise StoreError(f"the store {path} holds {what}: give an empty folder for this layout")


def check_kinds(identity: Identity, layout: StoreLayout) -> None:
    """Whether a layout has every kind that the identity's geometry declares.

    Raises:
      StoreError: a kind is missing, and a prefix restored from such a store would be half of one.
    """
    needed = needed_kinds(identity.geometry) or frozenset()
    missing = needed - set(layout.block_spans) - set(layout.snapshot_spans)
    if missing:
        raise StoreError(
            f"the layout has no {_names(missing)}, which the model's geometry declares: give a "
            "span for every kind"
        )


def check_capacity(capacity_bytes: int | None) -> None:
    """StoreError when it is no number of bytes."""
    try:
        _capacity(capacity_bytes)
    except ValueError as error:
        raise StoreError(f"{error}: give bytes, or None for no limit") from None


def _capacity(value: Any) -> int | None:
    if value is not None and (not isinstance(value, int) or value < 0):
        raise ValueError(f"capacity_bytes is {value!r}")
    return value


def _names(kinds: set[Kind] | frozenset[Kind]) -> str:
    return " and no ".join(sorted(kind.name for kind in kinds))

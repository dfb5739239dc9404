"""Manifests: one committed extension as a file, written last and checked field by field when read.

    manifests/<id>.json    tokens, digests, places, checksums by kind; and for each folder it uses
    segments/<id>/         every file with its size and checksum
    snapshots/<id>/

Bytes of a manifest may come from anywhere. Nothing is allocated by a number that stands in it: all
arrays are as long as the text that carries them, rows of a segment need files of that size, and
names are matched against what a store itself would have chosen.
"""

import dataclasses
import math
import re
import uuid
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import UInt8

from hybridkv.kinds import Kind
from hybridkv.prefixes.hashing import DIGEST_BYTES, sha256_block
from hybridkv.tiers.digests import CHECK_BYTES
from hybridkv.tiers.store import json as store_json
from hybridkv.tiers.store.records import (
    WORD_BYTES,
    BlockPlace,
    Extension,
    SnapshotAt,
    StoredExtension,
    StoreLayout,
)

FORMAT = "hybridkv.extension"
FORMAT_VERSION = 1
MOST_BYTES = 256 * 2**20
"""Of one manifest: about 25 million tokens."""
SEGMENTS = "segments"
SNAPSHOTS = "snapshots"
MANIFESTS = "manifests"
ID = re.compile(r"[0-9a-f]{32}")

_FILE_PART = re.compile(r"[A-Za-z0-9_\-][A-Za-z0-9_.\-]*")
_MOST_FILES = 64
_MOST_NUMBER = 2**48


@dataclasses.dataclass(frozen=True)
class FileRecord:
    """One file as it was written."""

    size: int
    """Bytes."""
    checksum: str
    """xxh3_128 in hexadecimal."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RawRange:
    """Where the rows of a folder lie in one of its files as they are, one after the other."""

    path: str
    """Of the file, inside the folder."""
    offset: int
    """Of the first row in the file, in bytes."""
    bytes: int
    """Of all rows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FolderRecord:
    """One segment or snapshot as it was written."""

    rows: int
    """Blocks of a segment, dead ones included; 1 for a snapshot."""
    files: Mapping[str, FileRecord]
    """By path inside the folder; none where a row has no words."""
    raw: RawRange | None = None
    """None where no file has the rows as they are: then only TensorStore can read them."""

    @property
    def bytes(self) -> int:
        """Sizes of its files."""
        return sum(file.size for file in self.files.values())


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Manifest:
    """What one manifest file says."""

    id: str
    identity: str
    """Root of the empty namespace of the store's identity, in hexadecimal."""
    extension: Extension
    places: tuple[BlockPlace, ...]
    block_checks: Mapping[Kind, UInt8[np.ndarray, "n 16"]]
    """xxh3_128 of the words of each kind, a row a block."""
    snapshot_ids: tuple[str, ...]
    snapshot_checks: tuple[Mapping[Kind, bytes], ...]
    folders: Mapping[str, FolderRecord]
    """By name inside the store, as in ``segments/<id>``."""
    written: float

    @property
    def key(self) -> str:
        """The file's name inside the store."""
        return key(self.id)

    @property
    def stored(self) -> StoredExtension:
        """As the store's callers see it."""
        return StoredExtension(
            id=self.id,
            extension=self.extension,
            blocks=self.places,
            snapshot_ids=self.snapshot_ids,
            written=self.written,
        )

    def encode(self) -> bytes:
        """The file's bytes."""
        extension = self.extension
        segments = sorted({place.segment for place in self.places})
        number = {segment: i for i, segment in enumerate(segments)}
        snapshots = [
            {
                "position": at.position,
                "digest": at.digest.hex(),
                "id": id_,
                "checks": {kind.value: check.hex() for kind, check in checks.items()},
            }
            for at, id_, checks in zip(
                extension.snapshots, self.snapshot_ids, self.snapshot_checks, strict=True
            )
        ]
        return store_json.encode(
            {
                "format": FORMAT,
                "version": FORMAT_VERSION,
                "id": self.id,
                "identity": self.identity,
                "root": extension.root.hex(),
                "parent": extension.parent.hex(),
                "first": extension.first,
                "written": self.written,
                "tokens": store_json.to_base64(extension.tokens.astype("<u4").tobytes()),
                "digests": store_json.to_base64(extension.digests.tobytes()),
                "segments": segments,
                "segment": [number[place.segment] for place in self.places],
                "index": [place.index for place in self.places],
                "checks": {
                    kind.value: store_json.to_base64(checks.tobytes())
                    for kind, checks in self.block_checks.items()
                },
                "snapshots": snapshots,
                "folders": {name: _folder_json(folder) for name, folder in self.folders.items()},
            }
        )

    def changed(
        self,
        block_tokens: int,
        *,
        blocks: int | None = None,
        without_snapshots: frozenset[str] = frozenset(),
        places: tuple[BlockPlace, ...] | None = None,
        folders: Mapping[str, FolderRecord] | None = None,
    ) -> "Manifest | None":
        """A copy of its first ``blocks`` blocks, without some snapshots; None when nothing is left.

        Args:
          block_tokens: tokens of a block of the store.
          blocks: how many blocks stay; None for all.
          without_snapshots: ids that go.
          places: new places of the blocks that stay.
          folders: records of folders that are new in ``places``.
        """
        extension = self.extension
        blocks = extension.blocks if blocks is None else blocks
        kept = [i for i, id_ in enumerate(self.snapshot_ids) if id_ not in without_snapshots]
        if not blocks and not kept:
            return None
        places = self.places[:blocks] if places is None else places
        snapshot_ids = tuple(self.snapshot_ids[i] for i in kept)
        used = {f"{SEGMENTS}/{place.segment}" for place in places}
        used |= {f"{SNAPSHOTS}/{id_}" for id_ in snapshot_ids}
        records = {**self.folders, **(folders or {})}
        return dataclasses.replace(
            self,
            extension=normal(
                dataclasses.replace(
                    extension,
                    tokens=extension.tokens[: blocks * block_tokens],
                    digests=extension.digests[:blocks],
                    snapshots=tuple(extension.snapshots[i] for i in kept),
                ),
                block_tokens,
            ),
            places=places,
            block_checks={k: v[:blocks] for k, v in self.block_checks.items()},
            snapshot_ids=snapshot_ids,
            snapshot_checks=tuple(self.snapshot_checks[i] for i in kept),
            folders={name: records[name] for name in sorted(used)},
        )


def new_id() -> str:
    """A name that was never used: what is deleted is never what replaced it."""
    return uuid.uuid4().hex


def key(manifest_id: str) -> str:
    """Name of a manifest's file inside the store."""
    return f"{MANIFESTS}/{manifest_id}.json"


def normal(extension: Extension, block_tokens: int) -> Extension:
    """Without blocks, an extension goes on from its last snapshot: it depends on nothing else."""
    if extension.blocks or not extension.snapshots:
        return extension
    last = max(extension.snapshots, key=lambda at: at.position)
    first = last.position // block_tokens
    return dataclasses.replace(extension, parent=last.digest, first=first)


def decode(manifest_id: str, data: bytes, layout: StoreLayout) -> Manifest:
    """What a file says, checked in itself; whether its folders and parent exist is not.

    Raises:
      ValueError: it is damaged, foreign or contradicts itself; the message is a short reason.
    """
    body = store_json.decode(data)
    if body.get("format") != FORMAT or body.get("version") != FORMAT_VERSION:
        raise ValueError(f"it is not {FORMAT} version {FORMAT_VERSION}")
    if body.get("id") != manifest_id:
        raise ValueError("it was written under another name")
    extension = _extension(body, layout)
    folders = _folders(body, layout)
    places = _places(body, extension.blocks, folders)
    ids = tuple(_id(item.get("id"), "snapshot") for item in body["snapshots"])
    used = {f"{SEGMENTS}/{x.segment}" for x in places} | {f"{SNAPSHOTS}/{x}" for x in ids}
    if used != set(folders) or len(set(ids)) != len(ids):
        raise ValueError("it names other folders than it uses")
    return Manifest(
        id=manifest_id,
        identity=store_json.from_hex(body.get("identity"), DIGEST_BYTES, "identity").hex(),
        extension=extension,
        places=places,
        block_checks=_block_checks(body.get("checks"), extension.blocks, layout),
        snapshot_ids=ids,
        snapshot_checks=tuple(
            _snapshot_checks(item.get("checks"), layout) for item in body["snapshots"]
        ),
        folders=folders,
        written=_seconds(body.get("written")),
    )


def check_extension(extension: Extension, block_tokens: int) -> None:
    """Whether it is consistent in itself: sizes, digests recomputed from tokens, positions.

    Raises:
      ValueError: it is not; the message is a short reason.
    """
    count = extension.blocks
    if len(extension.root) != DIGEST_BYTES or len(extension.parent) != DIGEST_BYTES:
        raise ValueError("root and parent have 32 bytes")
    if extension.digests.shape != (count, DIGEST_BYTES) or extension.digests.dtype != np.uint8:
        raise ValueError("digests are not uint8 of 32 bytes a block")
    if extension.tokens.shape != (count * block_tokens,) or extension.tokens.dtype != np.uint32:
        raise ValueError(f"tokens are not uint32, {block_tokens} for each of {count} blocks")
    if not count and not extension.snapshots:
        raise ValueError("it has neither blocks nor snapshots")
    if extension.first < 0 or (extension.first == 0) != (extension.parent == extension.root):
        raise ValueError("a first block, and no other, has the root as its parent")
    data, stride = extension.tokens.astype("<u4").tobytes(), 4 * block_tokens
    previous = extension.parent
    for number in range(count):
        previous = sha256_block(previous, data[number * stride : (number + 1) * stride])
        if previous != extension.digest(number):
            raise ValueError(f"the digest of block {extension.first + number} is not its tokens'")
    seen = set()
    for at in extension.snapshots:
        number, rest = divmod(at.position, block_tokens)
        if rest or not 1 <= number <= extension.end or at.digest in seen:
            raise ValueError(f"a snapshot can't stand at {at.position}, or stands there twice")
        if number > extension.first and extension.digest(number - 1 - extension.first) != at.digest:
            raise ValueError(f"the snapshot at {at.position} has not its block's digest")
        if number == extension.first and at.digest != extension.parent:
            raise ValueError(f"the snapshot at {at.position} has not its block's digest")
        seen.add(at.digest)
    wanted = normal(extension, block_tokens)
    if (wanted.first, wanted.parent) != (extension.first, extension.parent):
        raise ValueError("without blocks, it goes on from its last snapshot")


def _extension(body: dict[str, Any], layout: StoreLayout) -> Extension:
    tokens = store_json.from_base64(body.get("tokens"), "tokens")
    digests = store_json.from_base64(body.get("digests"), "digests")
    if len(digests) % DIGEST_BYTES or len(tokens) % 4:
        raise ValueError("tokens or digests are cut")
    snapshots = body.get("snapshots")
    if not isinstance(snapshots, list) or not all(isinstance(x, dict) for x in snapshots):
        raise ValueError("snapshots are not a list of objects")
    extension = Extension(
        root=store_json.from_hex(body.get("root"), DIGEST_BYTES, "root"),
        parent=store_json.from_hex(body.get("parent"), DIGEST_BYTES, "parent"),
        first=store_json.whole(body.get("first"), "first", 0, _MOST_NUMBER),
        tokens=np.frombuffer(tokens, "<u4").astype(np.uint32),
        digests=np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_BYTES),
        snapshots=tuple(
            SnapshotAt(
                position=store_json.whole(item.get("position"), "position", 1, _MOST_NUMBER),
                digest=store_json.from_hex(item.get("digest"), DIGEST_BYTES, "digest"),
            )
            for item in snapshots
        ),
    )
    check_extension(extension, layout.block_tokens)
    return extension


def _folders(body: dict[str, Any], layout: StoreLayout) -> dict[str, FolderRecord]:
    folders = body.get("folders")
    if not isinstance(folders, dict):
        raise ValueError("folders are not an object")
    return {name: _folder(name, value, layout) for name, value in folders.items()}


def _folder_json(folder: FolderRecord) -> dict[str, Any]:
    files = {path: [file.size, file.checksum] for path, file in folder.files.items()}
    told: dict[str, Any] = {"rows": folder.rows, "files": files}
    if folder.raw is not None:
        told["raw"] = dataclasses.asdict(folder.raw)
    return told


def _folder(name: str, value: Any, layout: StoreLayout) -> FolderRecord:
    group, _, id_ = name.partition("/")
    if group not in (SEGMENTS, SNAPSHOTS) or not ID.fullmatch(id_):
        raise ValueError("it names a folder that no store has")
    if not isinstance(value, dict) or not isinstance(value.get("files"), dict):
        raise ValueError("a folder is not an object with files")
    most, words = (
        (layout.segment_blocks, layout.block_words)
        if group == SEGMENTS
        else (1, layout.snapshot_words)
    )
    rows = store_json.whole(value.get("rows"), "rows", 1, most)
    if len(value["files"]) > _MOST_FILES:
        raise ValueError("a folder has more files than Orbax writes")
    files = {_path(path): _file(file) for path, file in value["files"].items()}
    raw = _raw(value.get("raw"), files, rows * words * WORD_BYTES)
    folder = FolderRecord(rows=rows, files=files, raw=raw)
    if rows * words * WORD_BYTES > folder.bytes:
        raise ValueError("a folder's files are smaller than its rows")
    return folder


def _raw(value: Any, files: Mapping[str, FileRecord], size: int) -> RawRange | None:
    """A range of ``size`` bytes inside one of the files."""
    if value is None:
        return None
    path = value.get("path") if isinstance(value, dict) else None
    if not isinstance(path, str) or path not in files:
        raise ValueError("the rows are not in a file of their folder")
    raw = RawRange(
        path=path,
        offset=store_json.whole(value.get("offset"), "offset", 0, files[path].size),
        bytes=store_json.whole(value.get("bytes"), "bytes", size, size),
    )
    if raw.offset + raw.bytes > files[path].size:
        raise ValueError("the rows go on after the end of their file")
    return raw


def _path(path: str) -> str:
    """A relative path that stays where it is."""
    if not all(_FILE_PART.fullmatch(part) for part in path.split("/")):
        raise ValueError("it names a file outside its folder")
    return path


def _file(value: Any) -> FileRecord:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("a file is not [size, checksum]")
    checksum = store_json.from_hex(value[1], CHECK_BYTES, "checksum").hex()
    return FileRecord(store_json.whole(value[0], "size", 0, _MOST_NUMBER), checksum)


def _places(
    body: dict[str, Any], count: int, folders: Mapping[str, FolderRecord]
) -> tuple[BlockPlace, ...]:
    segments, numbers, rows = (_list(body, name) for name in ("segments", "segment", "index"))
    if len(numbers) != count or len(rows) != count:
        raise ValueError("there are more or fewer places than blocks")
    ids = [_id(segment, "segment") for segment in segments]
    places = []
    for number, row in zip(numbers, rows, strict=True):
        id_ = ids[store_json.whole(number, "segment", 0, len(ids) - 1)]
        folder = folders.get(f"{SEGMENTS}/{id_}")
        if folder is None:
            raise ValueError("a place has no folder")
        places.append(BlockPlace(id_, store_json.whole(row, "index", 0, folder.rows - 1)))
    if len(set(places)) != count:
        raise ValueError("two blocks have one place")
    return tuple(places)


def _block_checks(
    value: Any, count: int, layout: StoreLayout
) -> dict[Kind, UInt8[np.ndarray, "n 16"]]:
    names = [kind.value for kind in layout.block_spans]
    if not isinstance(value, dict) or sorted(value) != sorted(names):
        raise ValueError(f"its blocks do not have the kinds {names}")
    checks = {}
    for kind in layout.block_spans:
        data = store_json.from_base64(value[kind.value], "checks")
        if len(data) != count * CHECK_BYTES:
            raise ValueError("there are more or fewer checksums than blocks")
        checks[kind] = np.frombuffer(data, np.uint8).reshape(count, CHECK_BYTES)
    return checks


def _snapshot_checks(value: Any, layout: StoreLayout) -> dict[Kind, bytes]:
    names = [kind.value for kind in layout.snapshot_spans]
    if not isinstance(value, dict) or sorted(value) != sorted(names):
        raise ValueError(f"a snapshot does not have the kinds {names}")
    return {
        kind: store_json.from_hex(value[kind.value], CHECK_BYTES, "check")
        for kind in layout.snapshot_spans
    }


def _list(body: dict[str, Any], name: str) -> list[Any]:
    value = body.get(name)
    if not isinstance(value, list):
        raise ValueError(f"{name} is not a list")
    return value


def _id(value: Any, name: str) -> str:
    if not isinstance(value, str) or not ID.fullmatch(value):
        raise ValueError(f"a {name} has a name that no store chooses")
    return value


def _seconds(value: Any) -> float:
    if not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError("written is not a time")
    return float(value)

"""One stored prefix as a folder: what a user's own checkpoint carries beside the model.

    <folder>/state/blocks_<n>/    zarr3, uint32 [blocks, words], one uncompressed chunk each
    <folder>/state/snapshot_<n>/  zarr3, uint32 [words]
    <folder>/prefix.json          identity, layout, tokens, chained digests, xxh3_128 of each kind
                                  of every block and snapshot, every file; checksummed, written last

A prefix is what its record says or nothing: lengths are compared with files before anything is
allocated, digests before anything comes back. Digests find damage, not malice. One call writes a
folder, once; any thread reads. TensorStore is imported when it is needed.
"""

import dataclasses
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import UInt8, UInt32

from hybridkv.errors import UserError
from hybridkv.kinds import Kind
from hybridkv.prefixes.hashing import DIGEST_BYTES, block_hashes
from hybridkv.prefixes.identity import Identity
from hybridkv.tiers.digests import CHECK_BYTES, row_digests
from hybridkv.tiers.record_parts import identity_json, identity_of, sizes_of, spans_of
from hybridkv.tiers.store import json as store_json
from hybridkv.tiers.store.folder import Folder, one_line
from hybridkv.tiers.store.records import WORD_BYTES
from hybridkv.tiers.store.segments import start_read

FORMAT = "hybridkv.prefix"
FORMAT_VERSION = 1
FILE = "prefix.json"
ARRAYS = "state"
_MOST_BYTES = 256 * 2**20
_ARRAY_BYTES = 64 * 2**20
"""Of blocks that are written as one array, about."""
_METADATA = "zarr.json"


class PrefixRefused(UserError):  # noqa: N818 - reads as what happened
    """A stored prefix that is not used: the message says why and what to do."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PrefixWords:
    """A prefix on the host: whole blocks, and snapshots at the ends of some of them."""

    identity: Identity
    root: bytes
    """``identity.root(namespace)``, 32 bytes: the namespace itself stays with its owner."""
    block_tokens: int
    block_spans: Mapping[Kind, slice]
    """Words of a block by kind."""
    snapshot_spans: Mapping[Kind, slice]
    """Words of a snapshot by kind."""
    tokens: UInt32[np.ndarray, " blocks_x_block_tokens"]
    blocks: UInt32[np.ndarray, "blocks words"]
    positions: tuple[int, ...]
    """Tokens before each snapshot, ascending."""
    snapshots: UInt32[np.ndarray, "snapshots words"]

    @property
    def digests(self) -> UInt8[np.ndarray, "blocks 32"]:
        """Chained digest of each block."""
        return block_hashes(self.root, 0, self.tokens, self.block_tokens)[0]

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return self.blocks.nbytes + self.snapshots.nbytes + self.tokens.nbytes


def write(path: pathlib.Path, prefix: PrefixWords) -> None:
    """Writes a prefix into an empty folder, its record last.

    Raises:
      PrefixRefused: the folder can't be written.
    """
    folder = Folder(path)
    try:
        _write_arrays(path, prefix)
        files = {name: [file.size, file.checksum] for name, file in folder.records(ARRAYS).items()}
        folder.write(FILE, store_json.encode(_body(prefix, files)))
    except (OSError, ValueError) as error:
        raise PrefixRefused(
            f"can't write the prefix to {path} ({one_line(error)}): mend that and save again"
        ) from error


def read(path: pathlib.Path) -> PrefixWords:
    """The prefix in a folder, every length and digest compared.

    Raises:
      PrefixRefused: it is not there, not whole, of another version, or not one.
    """
    folder = Folder(path)
    try:
        body = store_json.decode(folder.read(FILE, _MOST_BYTES))
        shell = _shell(body)
        _require_files(folder, body["files"])
        blocks, snapshots = _read_arrays(path, shell, body["blocks"])
        prefix = dataclasses.replace(shell, blocks=blocks, snapshots=snapshots)
        _require_checks(prefix, body)
    except FileNotFoundError:
        raise PrefixRefused(
            f"{path} holds no prefix (it has no whole {FILE}): give a folder that one was saved to"
        ) from None
    except Exception as error:  # TensorStore raises whatever it likes; nothing of it is used
        raise PrefixRefused(
            f"the prefix in {path} can't be used: {one_line(error)}; save it again"
        ) from error
    return prefix


def _body(prefix: PrefixWords, files: Mapping[str, Any]) -> dict[str, Any]:
    def encoded(rows: np.ndarray, spans: Mapping[Kind, slice]) -> dict[str, str]:
        found = row_digests(list(rows), spans)
        return {kind.value: store_json.to_base64(sums.tobytes()) for kind, sums in found.items()}

    return {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "identity": identity_json(prefix.identity),
        "root": prefix.root.hex(),
        "block_tokens": prefix.block_tokens,
        "block_words": sizes_of(prefix.block_spans),
        "snapshot_words": sizes_of(prefix.snapshot_spans),
        "tokens": store_json.to_base64(prefix.tokens.astype("<u4").tobytes()),
        "digests": store_json.to_base64(prefix.digests.tobytes()),
        "positions": list(prefix.positions),
        "blocks": _groups(prefix.blocks),
        "block_checks": encoded(prefix.blocks, prefix.block_spans),
        "snapshot_checks": encoded(prefix.snapshots, prefix.snapshot_spans),
        "files": dict(files),
    }


def _shell(body: dict[str, Any]) -> PrefixWords:
    """The record's fields, each checked; the words are still missing."""
    if body.get("format") != FORMAT or body.get("version") != FORMAT_VERSION:
        raise ValueError(f"it is not {FORMAT} version {FORMAT_VERSION}")
    size = store_json.whole(body["block_tokens"], "block_tokens", 1, 2**31)
    tokens = np.frombuffer(store_json.from_base64(body["tokens"], "tokens"), "<u4")
    count, beyond = divmod(tokens.size, size)
    if beyond or not count:
        raise ValueError("its tokens are not whole blocks")
    if not isinstance(body["positions"], list) or not isinstance(body["files"], dict):
        raise ValueError("a field has another type")
    positions = tuple(
        store_json.whole(at, "a position", size, tokens.size) for at in body["positions"]
    )
    if sorted(set(positions)) != list(positions) or any(at % size for at in positions):
        raise ValueError("its snapshots stand elsewhere than at ends of blocks")
    shell = PrefixWords(
        identity=identity_of(body["identity"]),
        root=store_json.from_hex(body["root"], DIGEST_BYTES, "root"),
        block_tokens=size,
        block_spans=spans_of(body["block_words"], "block_words"),
        snapshot_spans=spans_of(body["snapshot_words"], "snapshot_words"),
        tokens=tokens.astype(np.uint32),
        blocks=np.empty((0, 0), np.uint32),
        positions=positions,
        snapshots=np.empty((0, 0), np.uint32),
    )
    if store_json.from_base64(body["digests"], "digests") != shell.digests.tobytes():
        raise ValueError("its digests are not those of its tokens")
    groups = body["blocks"]
    if not isinstance(groups, list) or any(
        store_json.whole(group, "blocks", 1, count) < 1 for group in groups
    ):
        raise ValueError("its arrays are not listed")
    words = sum(sizes_of(shell.block_spans).values())
    if sum(groups) != (count if words else 0):
        raise ValueError("it has more or fewer blocks than tokens")
    return shell


def _require_files(folder: Folder, files: Mapping[str, Any]) -> None:
    """All files are there and as long as they were; small ones also have their digest."""
    if not folder.is_real(ARRAYS) and files:
        raise ValueError(f"{ARRAYS} is not there")
    found = folder.sizes(ARRAYS) if files else {}
    if found.keys() != files.keys():
        raise ValueError("it has more or fewer files than were written")
    for name, (size, checksum) in files.items():
        if found[name] != size:
            raise ValueError(f"{name} has {found[name]} bytes, not {size}")
        if name.endswith(_METADATA) and folder.checksum(f"{ARRAYS}/{name}") != checksum:
            raise ValueError(f"{name} does not have its digest")


def _require_checks(prefix: PrefixWords, body: Mapping[str, Any]) -> None:
    for what, rows, spans, expected in (
        ("block", prefix.blocks, prefix.block_spans, body["block_checks"]),
        ("snapshot", prefix.snapshots, prefix.snapshot_spans, body["snapshot_checks"]),
    ):
        found = row_digests(list(rows), spans)
        if sorted(expected) != sorted(kind.value for kind in spans):
            raise ValueError(f"its {what}s have digests of other kinds")
        for kind, sums in found.items():
            data = store_json.from_base64(expected[kind.value], "digests")
            if len(data) != len(rows) * CHECK_BYTES:
                raise ValueError(f"there are more or fewer digests than {what}s")
            wrong = (np.frombuffer(data, np.uint8).reshape(sums.shape) != sums).any(axis=1)
            if wrong.any():
                number = int(np.argmax(wrong))
                raise ValueError(f"{kind.name} of {what} {number} does not have its digest")


# Arrays.


def _groups(blocks: UInt32[np.ndarray, "blocks words"]) -> list[int]:
    """Blocks of each array."""
    count, words = blocks.shape
    if not words:
        return []
    each = max(1, _ARRAY_BYTES // (words * WORD_BYTES))
    return [min(each, count - first) for first in range(0, count, each)]


def _named(
    blocks: np.ndarray, groups: list[int], snapshots: np.ndarray
) -> dict[str, UInt32[np.ndarray, "..."]]:
    """Views of the words by the name of their array."""
    arrays, first = {}, 0
    for number, group in enumerate(groups):
        arrays[f"blocks_{number}"] = blocks[first : first + group]
        first += group
    if snapshots.shape[1]:
        arrays |= {f"snapshot_{number}": row for number, row in enumerate(snapshots)}
    return arrays


def _write_arrays(path: pathlib.Path, prefix: PrefixWords) -> None:
    import tensorstore as ts

    named = _named(prefix.blocks, _groups(prefix.blocks), prefix.snapshots)
    for name, array in named.items():
        chunk = {"name": "regular", "configuration": {"chunk_shape": list(array.shape)}}
        spec = {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": f"{path}/{ARRAYS}/{name}/"},
            "metadata": {
                "shape": list(array.shape),
                "data_type": "uint32",
                "chunk_grid": chunk,
                "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
            },
            # A chunk of zeros is a file like any other.
            "store_data_equal_to_fill_value": True,
        }
        ts.open(spec, create=True, open=False).result().write(array).result()
        if not np.array_equal(start_read(path, name, array.shape).result(), array):
            raise OSError(f"{name} does not hold what was written")


def _read_arrays(
    path: pathlib.Path, shell: PrefixWords, groups: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Blocks and snapshots; the files are as long as the record says, and so are these."""
    count = len(shell.tokens) // shell.block_tokens
    shapes = [
        (rows, sum(sizes_of(spans).values()))
        for rows, spans in (
            (count, shell.block_spans),
            (len(shell.positions), shell.snapshot_spans),
        )
    ]
    # Nothing is allocated by a number that the files do not bear out.
    on_disk = sum(Folder(path).sizes(ARRAYS).values())
    if sum(math.prod(shape) for shape in shapes) * WORD_BYTES > on_disk:
        raise ValueError("its files are smaller than its blocks and snapshots")
    blocks, snapshots = (np.empty(shape, np.uint32) for shape in shapes)
    targets = _named(blocks, groups, snapshots)
    reads = {name: start_read(path, name, view.shape) for name, view in targets.items()}
    for name, read_ in reads.items():
        targets[name][...] = read_.result()
    return blocks, snapshots

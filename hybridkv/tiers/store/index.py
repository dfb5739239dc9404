"""What a store holds, in memory: which manifest has a block, and what depends on what.

    root <- d0 <- d1 <- d2          a block depends on the one before it
                   ^     ^
                   s     s          a snapshot depends on the block it stands on

Every block and snapshot belongs to exactly one manifest, and whatever it depends on is here too: a
manifest is added after what it depends on, and taken out before. One thread changes an index; who
else reads it holds the store's mutex.
"""

import collections
import heapq
from collections.abc import Iterable, Iterator

from hybridkv.kinds import Kind
from hybridkv.tiers.store.manifest import SEGMENTS, SNAPSHOTS, FolderRecord, Manifest
from hybridkv.tiers.store.records import BlockPlace, ProblemKind, StoreError


class RefusedError(ValueError):
    """A manifest can't be added; ``kind`` says why."""

    def __init__(self, kind: ProblemKind, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class Index:
    """All manifests that are whole, by what can be found through them."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.manifests: dict[str, Manifest] = {}
        self.blocks: dict[bytes, tuple[str, int]] = {}
        """Digest to (manifest, number in it)."""
        self.snapshots: dict[bytes, tuple[str, int]] = {}
        """Digest of the block below to (manifest, number in it)."""
        self.snapshot_ids: dict[str, tuple[str, int]] = {}
        self.rows: dict[str, dict[int, bytes]] = {}
        """Segment to row to digest: the rows that are alive."""
        self.checks: dict[str, dict[int, dict[Kind, bytes]]] = {}
        """Segment to row to xxh3_128 by kind; of dead rows too, since a read may be on its way."""
        self.folders: dict[str, FolderRecord] = {}
        self._dependents: collections.Counter[bytes] = collections.Counter()
        """How many blocks and snapshots depend on a block."""

    def add(self, manifest: Manifest) -> None:
        """Adds one, or changes nothing.

        Raises:
          RefusedError: what it depends on is not here, or what it holds is here already.
        """
        self._check(manifest)
        extension, id_ = manifest.extension, manifest.id
        self.manifests[id_] = manifest
        for number, place in enumerate(manifest.places):
            digest = extension.digest(number)
            self.blocks[digest] = (id_, number)
            self.rows.setdefault(place.segment, {})[place.index] = digest
            self.checks.setdefault(place.segment, {})[place.index] = {
                kind: checks[number].tobytes() for kind, checks in manifest.block_checks.items()
            }
        for number, (at, snapshot) in enumerate(
            zip(extension.snapshots, manifest.snapshot_ids, strict=True)
        ):
            self.snapshots[at.digest] = (id_, number)
            self.snapshot_ids[snapshot] = (id_, number)
        self._dependents.update(_dependencies(manifest))
        self.folders.update(manifest.folders)

    def discard(self, manifest_id: str) -> None:
        """Takes one out; its folders go with their last block."""
        manifest = self.manifests.pop(manifest_id)
        extension = manifest.extension
        for number, place in enumerate(manifest.places):
            del self.blocks[extension.digest(number)]
            rows = self.rows[place.segment]
            del rows[place.index]
            if not rows:
                del self.rows[place.segment]
                del self.folders[f"{SEGMENTS}/{place.segment}"]
        for at, snapshot in zip(extension.snapshots, manifest.snapshot_ids, strict=True):
            del self.snapshots[at.digest], self.snapshot_ids[snapshot]
            del self.folders[f"{SNAPSHOTS}/{snapshot}"]
        self._dependents.subtract(_dependencies(manifest))
        self._dependents += collections.Counter()  # drops zeros

    def replace(self, old: Manifest, new: Manifest | None) -> None:
        """Puts another version in the place of one, or none."""
        self.discard(old.id)
        if new is not None:
            self.add(new)
        self._forget_dead(set(old.folders))

    def adopt_checks(self, earlier: "Index") -> None:
        """Keeps checksums of rows that an earlier index knew and that died since."""
        for segment in self.rows.keys() & earlier.checks.keys():
            self.checks[segment] = {**earlier.checks[segment], **self.checks[segment]}

    def _forget_dead(self, names: set[str]) -> None:
        for name in names - self.folders.keys():
            self.checks.pop(name.removeprefix(f"{SEGMENTS}/"), None)

    def sparse(self) -> list[str]:
        """Segments of which less than half is alive, in the order of their tokens."""

        def place(segment: str) -> tuple[bytes, int, str]:
            owner, number = self.blocks[min(self.rows[segment].items())[1]]
            extension = self.manifests[owner].extension
            return extension.root, extension.first + number, segment

        found = [
            segment
            for segment, rows in self.rows.items()
            if 2 * len(rows) < self.folders[f"{SEGMENTS}/{segment}"].rows
        ]
        return sorted(found, key=place)

    def ordered(self) -> Iterator[Manifest]:
        """Every manifest after those it depends on."""
        return iter(sorted(self.manifests.values(), key=_order))

    def reduced(
        self,
        places: Iterable[BlockPlace],
        snapshots: Iterable[str],
        *,
        with_children: bool = False,
    ) -> list[tuple[Manifest, Manifest | None]]:
        """Manifests as they are and as they are without some blocks and snapshots, leaves first.

        A place or an id that is not here is passed over: it is gone already. With children, what
        depends on the blocks goes too.

        Raises:
          StoreError: something that stays depends on something that goes.
        """
        ids = frozenset(id_ for id_ in snapshots if id_ in self.snapshot_ids)
        digests = {
            self.rows[x.segment][x.index] for x in places if x.index in self.rows.get(x.segment, {})
        }
        try:
            self._check_leaves(digests, ids)
        except StoreError:
            if not with_children:
                raise
            ids |= self._add_children(digests)  # walks everything
        owners: dict[str, int] = collections.Counter(self.blocks[d][0] for d in digests)
        for id_ in ids:
            owners.setdefault(self.snapshot_ids[id_][0], 0)
        changes = []
        for owner, gone in owners.items():
            manifest = self.manifests[owner]
            reduced = manifest.changed(
                self.block_tokens,
                blocks=manifest.extension.blocks - gone,
                without_snapshots=ids,
            )
            changes.append((manifest, reduced))
        return sorted(changes, key=lambda x: _order(x[0]), reverse=True)

    def _add_children(self, digests: set[bytes]) -> frozenset[str]:
        """Adds what depends on blocks to them; the snapshots that do."""
        ids: set[str] = set()
        for manifest in self.ordered() if digests else ():
            extension = manifest.extension
            for number in range(extension.blocks):
                below = extension.digest(number - 1) if number else extension.parent
                if below in digests:
                    digests.add(extension.digest(number))
            standing = zip(extension.snapshots, manifest.snapshot_ids, strict=True)
            ids |= {id_ for at, id_ in standing if at.digest in digests}
        return frozenset(ids)

    def leaf_first(self) -> Iterator[Manifest]:
        """Every manifest before those it depends on; of those without dependents, the oldest."""
        below = {
            id_: {self.blocks[x][0] for x in _dependencies(manifest) if x in self.blocks} - {id_}
            for id_, manifest in self.manifests.items()
        }
        dependents = collections.Counter(owner for owners in below.values() for owner in owners)
        leaves = [(x.written, x.id) for x in self.manifests.values() if not dependents[x.id]]
        heapq.heapify(leaves)
        while leaves:
            _, id_ = heapq.heappop(leaves)
            yield self.manifests[id_]
            for owner in below[id_]:
                dependents[owner] -= 1
                if not dependents[owner]:
                    heapq.heappush(leaves, (self.manifests[owner].written, owner))

    def _check(self, manifest: Manifest) -> None:
        extension = manifest.extension
        if extension.parent != extension.root:
            self._check_block(manifest, extension.parent, extension.first)
        for number, place in enumerate(manifest.places):
            if extension.digest(number) in self.blocks:
                raise RefusedError(ProblemKind.DUPLICATE, "another manifest has its blocks too")
            if place.index in self.rows.get(place.segment, {}):
                raise RefusedError(ProblemKind.FOREIGN, "another manifest has its places too")
        for at, snapshot in zip(extension.snapshots, manifest.snapshot_ids, strict=True):
            if at.digest in self.snapshots or snapshot in self.snapshot_ids:
                raise RefusedError(ProblemKind.DUPLICATE, "another manifest has its snapshots too")
            if at.position // self.block_tokens <= extension.first:
                self._check_block(manifest, at.digest, at.position // self.block_tokens)
        for name, folder in manifest.folders.items():
            if self.folders.get(name, folder) != folder:
                raise RefusedError(ProblemKind.FOREIGN, f"another manifest has another {name}")

    def _check_block(self, manifest: Manifest, digest: bytes, number: int) -> None:
        """Whether the ``number``-th block of a sequence, from 1, is here under this digest."""
        if digest not in self.blocks:
            raise RefusedError(ProblemKind.NO_PARENT, "what it goes on from is not in the store")
        owner, at = self.blocks[digest]
        other = self.manifests[owner].extension
        if other.root != manifest.extension.root or other.first + at + 1 != number:
            raise RefusedError(ProblemKind.FOREIGN, "what it goes on from stands elsewhere")

    def _check_leaves(self, digests: set[bytes], ids: frozenset[str]) -> None:
        going: collections.Counter[bytes] = collections.Counter()
        for digest in digests:
            owner, number = self.blocks[digest]
            extension = self.manifests[owner].extension
            going[extension.digest(number - 1) if number else extension.parent] += 1
        for id_ in ids:
            owner, number = self.snapshot_ids[id_]
            going[self.manifests[owner].extension.snapshots[number].digest] += 1
        for digest in digests:
            if self._dependents[digest] != going[digest]:
                raise StoreError(
                    "a block that others go on from can't be removed: remove its children and its "
                    "snapshot with it or before it"
                )


def _dependencies(manifest: Manifest) -> Iterator[bytes]:
    """Digest of the block below each of its blocks and snapshots."""
    extension = manifest.extension
    for number in range(extension.blocks):
        yield extension.digest(number - 1) if number else extension.parent
    for at in extension.snapshots:
        yield at.digest


def _order(manifest: Manifest) -> tuple[int, str]:
    """Whatever a manifest depends on has a smaller one, as it begins before this one."""
    return manifest.extension.first, manifest.id

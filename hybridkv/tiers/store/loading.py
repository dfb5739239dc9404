r"""From a folder's manifests to an index: what is not whole is left out, with a reason.

    list --> read --> checksum --> fields --> chained digests --> files and sizes --> parents first
                 \________________________ Problem ________________________/

Nothing is written or deleted here. Used by one thread at a time.
"""

from hybridkv.tiers.faults import Faults, Point
from hybridkv.tiers.store import manifest as manifests
from hybridkv.tiers.store.folder import Folder, one_line
from hybridkv.tiers.store.header import Header
from hybridkv.tiers.store.index import Index, RefusedError
from hybridkv.tiers.store.manifest import MANIFESTS, Manifest
from hybridkv.tiers.store.records import Problem, ProblemKind, StoreError

_ENDING = ".json"


class Loader:
    """Manifests as they were when last looked at; looking again reads only what has changed."""

    def __init__(self, folder: Folder, header: Header, faults: Faults) -> None:
        self._folder = folder
        self._header = header
        self._faults = faults
        self._versions: dict[str, tuple[int, int, int]] = {}
        self._unusable: dict[str, Problem] = {}
        self.decoded: dict[str, Manifest] = {}
        """Every manifest that says something, also when its files or its parent are missing."""
        self.unreadable = False
        """Whether some manifest says nothing, so that what it refers to is not known."""

    def look(self) -> tuple[Index, list[Problem]]:
        """The index of all that is whole now, and why the rest is not.

        Raises:
          StoreError: the folder can't be listed.
        """
        found = {}
        for key in self._list():
            id_ = id_of(key)
            if id_ is not None:
                found[id_] = key
        for id_ in (set(self._versions) | set(self.decoded)) - set(found):
            self._forget(id_)
        problems: list[Problem] = []
        for id_, key in found.items():
            self._read(id_, key, problems)
        self.unreadable = any(x not in self.decoded for x in found)
        return self._index(problems), problems

    def is_spare(self, problem: Problem, index: Index) -> bool:
        """Whether it is a manifest of which everything is in the index, through others.

        It could not be read for a while, or lacks a file, and the same was stored once more.
        """
        manifest = self.decoded.get(id_of(problem.file) or "")
        kinds = (ProblemKind.DUPLICATE, ProblemKind.MISSING)
        if problem.kind not in kinds or manifest is None:
            return False
        extension = manifest.extension
        blocks = all(extension.digest(i) in index.blocks for i in range(extension.blocks))
        return blocks and all(at.digest in index.snapshots for at in extension.snapshots)

    def forget(self, key: str) -> None:
        """A manifest was deleted."""
        self._forget(id_of(key) or "")

    def _list(self) -> list[str]:
        try:
            keys = self._folder.keys(MANIFESTS)
            self._faults.reach(Point.LIST, path=self._folder.path / MANIFESTS)
        except (OSError, ValueError) as error:
            raise StoreError(
                f"can't list the store {self._folder.path} ({one_line(error)}): mend that"
            ) from error
        return keys

    def _read(self, id_: str, key: str, problems: list[Problem]) -> None:
        """Reads one manifest unless it is the one that was read, and checks its files."""
        try:
            version = self._folder.version(key)
            if self._versions.get(id_) == version:
                return
            self._forget(id_)
            data = self._folder.read(key, manifests.MOST_BYTES)
            data = self._faults.reach(Point.READ_MANIFEST, data, self._folder.path / key)
            manifest = manifests.decode(id_, data, self._header.layout)
        except FileNotFoundError:
            return  # deleted since it was listed
        except (OSError, ValueError) as error:
            problems.append(Problem(kind=_kind(error), file=key, reason=one_line(error)))
            return
        self.decoded[id_] = manifest
        problem = self._problem(manifest)
        if problem is None:
            self._versions[id_] = version
        else:  # not remembered, so that the next look tries again
            self._unusable[id_] = problem
            problems.append(problem)

    def _forget(self, id_: str) -> None:
        self._versions.pop(id_, None)
        self._unusable.pop(id_, None)
        self.decoded.pop(id_, None)

    def _problem(self, manifest: Manifest) -> Problem | None:
        if manifest.identity != self._header.digest:
            reason = "it was written for another identity"
            return Problem(kind=ProblemKind.FOREIGN, file=manifest.key, reason=reason)
        for name, record in manifest.folders.items():
            if record.files and not self._folder.is_real(name):
                reason = f"{name} is not there"
                return Problem(kind=ProblemKind.MISSING, file=manifest.key, reason=reason)
            for path, file in record.files.items():
                if not self._folder.is_file(f"{name}/{path}", file.size):
                    reason = f"{name}/{path} is not there with {file.size} bytes"
                    return Problem(kind=ProblemKind.MISSING, file=manifest.key, reason=reason)
        return None

    def _index(self, problems: list[Problem]) -> Index:
        """Parents before children, so that a manifest that goes on from nothing is left out.

        Of those that hold the same, the longest first: it needs no other.
        """
        index = Index(self._header.layout.block_tokens)
        usable = [m for id_, m in self.decoded.items() if id_ not in self._unusable]
        for manifest in sorted(usable, key=_order):
            try:
                index.add(manifest)
            except RefusedError as error:
                problems.append(Problem(kind=error.kind, file=manifest.key, reason=str(error)))
        return index


def _order(manifest: Manifest) -> tuple[int, int, str]:
    return manifest.extension.first, -manifest.extension.blocks, manifest.id


def id_of(key: str) -> str | None:
    """The manifest's id in a file's name; None when no store chooses such a name."""
    name = key.removeprefix(f"{MANIFESTS}/")
    id_ = name.removesuffix(_ENDING)
    return id_ if manifests.ID.fullmatch(id_) and manifests.key(id_) == key else None


def _kind(error: Exception) -> ProblemKind:
    """A wrong checksum or an unreadable file is damage; a file that reads well is foreign."""
    damaged = isinstance(error, OSError) or "checksum" in str(error)
    return ProblemKind.DAMAGED if damaged else ProblemKind.FOREIGN

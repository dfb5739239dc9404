"""Reads every byte of a store and says what is not as it was written.

Needs no model and no lock; while a writer is at work, what it just made or deleted may be told too.
"""

from collections.abc import Callable

from hybridkv.tiers.faults import NO_FAULTS
from hybridkv.tiers.store import header as store_header
from hybridkv.tiers.store.folder import Folder, one_line
from hybridkv.tiers.store.header import FILE, LOCK
from hybridkv.tiers.store.loading import Loader, id_of
from hybridkv.tiers.store.manifest import MANIFESTS, FileRecord
from hybridkv.tiers.store.records import Problem, ProblemKind, StoreError

Progress = Callable[[int, int], None]
"""(bytes that were read, bytes in all)."""


def verify(folder: Folder, progress: Progress | None = None) -> list[Problem]:
    """Everything that is wrong with a store, in the order of its files' names.

    Args:
      folder: of the store.
      progress: is told how far it is.

    Raises:
      StoreError: there is no store in the folder, or it can't be read at all.
    """
    data = store_header.read_bytes(folder)
    if data is None:
        raise StoreError(f"there is no store at {folder.path}: give the folder of one")
    try:
        header = store_header.decode(data)
    except ValueError as error:
        # Without it nothing else can be judged: not the layout, not the identity.
        return [Problem(kind=ProblemKind.DAMAGED, file=FILE, reason=str(error))]
    loader = Loader(folder, header, NO_FAULTS)
    _, problems = loader.look()
    expected: dict[str, FileRecord] = {}
    for manifest in loader.decoded.values():
        for name, record in manifest.folders.items():
            expected |= {f"{name}/{path}": file for path, file in record.files.items()}
    sizes = folder.sizes()
    problems += _unreferenced(sizes, set(expected))
    problems += _contents(folder, sizes, expected, progress)
    return sorted(problems, key=lambda x: (x.file, x.kind.value))


def _unreferenced(sizes: dict[str, int], expected: set[str]) -> list[Problem]:
    """Files that nobody refers to. A manifest is referred to by its own name."""
    strays = []
    for name in sizes.keys() - expected - {FILE, LOCK}:
        if name.startswith(f"{MANIFESTS}/") and id_of(name) is not None:
            continue
        reason = "no manifest refers to it"
        strays.append(Problem(kind=ProblemKind.UNREFERENCED, file=name, reason=reason))
    return strays


def _contents(
    folder: Folder,
    sizes: dict[str, int],
    expected: dict[str, FileRecord],
    progress: Progress | None,
) -> list[Problem]:
    """Files whose size or checksum is not the manifest's."""
    problems = []
    total, done = sum(sizes.get(name, 0) for name in expected), 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    for name, record in sorted(expected.items()):
        size = sizes.get(name)
        reason = None
        if size is None:
            reason = "it is not there"
        elif size != record.size:
            reason = f"it has {size} bytes, not {record.size}"
        else:
            try:
                if folder.checksum(name, advance) != record.checksum:
                    reason = "its checksum does not fit its bytes"
            except OSError as error:
                reason = f"it can't be read ({one_line(error)})"
        if reason is not None:
            kind = ProblemKind.MISSING if size != record.size else ProblemKind.DAMAGED
            problems.append(Problem(kind=kind, file=name, reason=reason))
    return problems

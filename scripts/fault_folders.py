"""Folders that are not, or no more, whole stores: what an engine makes of them.

Each case makes or damages a folder and gives it to the engine of a ``Lab``, which must answer with
the bits of cold runs, say in one line what is wrong, and be at rest afterwards. Where the engine
may not write, the process takes another user's rights for a while, if it is root.
"""

import contextlib
import dataclasses
import functools
import os
import pathlib
import resource
import shutil
from collections.abc import Callable, Iterator

from fault_lab import Lab

from hybridkv.blocks.entries import Tier
from hybridkv.tiers.store import Store
from hybridkv.tiers.store import header as store_header
from hybridkv.tiers.store import json as store_json
from hybridkv.tiers.store.folder import Folder
from hybridkv.tiers.store.verify import verify
from hybridkv.tiers.storing import PAUSE_S

_NOBODY = 65534


@dataclasses.dataclass(kw_only=True)
class Case:
    """What came of one folder."""

    name: str
    line: str = ""
    """What the tiers said."""
    wrong: list[str] = dataclasses.field(default_factory=list)
    problems: int = 0


def files_of(path: pathlib.Path) -> list[pathlib.Path]:
    """Files with bytes in them, sorted."""
    return sorted(x for x in path.rglob("*") if x.is_file() and x.stat().st_size)


def flip(path: pathlib.Path, at: int) -> None:
    """Turns one bit of a file."""
    data = bytearray(path.read_bytes())
    data[at % len(data)] ^= 1 << at % 8
    path.write_bytes(data)


def flips(
    lab: Lab, template: pathlib.Path, path: pathlib.Path, progress: Callable[[str], None]
) -> list[Case]:
    """One byte of each file of a store, one file at a time: found, and never decoded from."""
    cases = []
    names = [x.relative_to(template).as_posix() for x in files_of(template)]
    for number, name in enumerate(names):
        progress(f"a byte of {name}")
        case = Case(name=name)
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(template, path)
        flip(path / name, 7919 * (number + 1))
        found = [x for x in verify(Folder(path)) if x.file == name]
        case.line = str(found[0]) if found else ""
        case.wrong += [] if found else ["verify did not find it"]
        _warm(lab, case, path)
        cases.append(case)
    return cases


def _warm(lab: Lab, case: Case, path: pathlib.Path) -> None:
    """An engine that loads what it can of a store in which something was turned."""
    try:
        lab.attach(lab.options(path))
        case.wrong += lab.ask("first", "tenant", "fork")
        lab.flush()
        case.wrong += lab.held()
        lab.detach()
    except Exception as error:  # the case is over, and this is what it found
        case.wrong.append(f"{type(error).__name__}: {error}")
        lab.attach(None)


def folders(lab: Lab, template: pathlib.Path, path: pathlib.Path) -> list[Case]:
    """All cases, each in a folder of its own name."""
    cases = []
    for name, (prepare, during) in _CASES.items():
        here = path / name.replace(" ", "_").replace(",", "")
        shutil.copytree(template, here)
        case = Case(name=name)
        with prepare(lab, here):
            _engine(lab, case, functools.partial(during, lab, here), path=here)
        cases.append(case)
    cases.append(_full(lab, template, path / "full"))
    cases.append(_capacity(lab, path / "capacity"))
    return cases


def _engine(
    lab: Lab,
    case: Case,
    during: Callable[[], None],
    *,
    path: pathlib.Path,
) -> None:
    """An engine on the folder: requests, something that happens, the same requests again."""
    try:
        lab.attach(lab.options(path))
        case.wrong += lab.ask("first", "tenant", "alone")
        during()
        lab.forget(Tier.DEVICE, Tier.HOST)
        case.wrong += lab.ask("first", "tenant", "fork")
        lab.flush()
        case.wrong += lab.held()
        mover = lab.mover
        said = mover.unusable or mover.counters.last_error
        if not said and mover.store is not None and mover.store.problems:
            said = str(mover.store.problems[0])
        case.line = case.line or said
        case.wrong += ["nothing was said"] if not said else []
        case.wrong += ["more than a line"] if "\n" in said else []
        lab.detach()
    except Exception as error:  # the case is over, and this is what it found
        case.wrong.append(f"{type(error).__name__}: {error}")
        lab.attach(None)


# What is done to a folder before, and while the engine is at work.

_Prepare = Callable[[Lab, pathlib.Path], contextlib.AbstractContextManager[None]]


def _before(change: Callable[[pathlib.Path], None]) -> _Prepare:
    @contextlib.contextmanager
    def prepare(lab: Lab, path: pathlib.Path) -> Iterator[None]:
        change(path)
        yield

    return prepare


def _nothing(lab: Lab, path: pathlib.Path) -> None:
    """Nothing happens."""


def _no_store(path: pathlib.Path) -> None:
    shutil.rmtree(path)
    path.mkdir()
    (path / "notes.txt").write_text("mine")


def _somebody_elses(path: pathlib.Path) -> None:
    shutil.rmtree(path)
    (path / "segments").mkdir(parents=True)
    (path / "segments" / "part_1.mp4").write_text("mine")


def _a_file(path: pathlib.Path) -> None:
    shutil.rmtree(path)
    path.write_text("mine")


def _other_version(path: pathlib.Path) -> None:
    file = path / store_header.FILE
    body = store_json.decode(file.read_bytes())
    file.write_bytes(store_json.encode(body | {"version": store_header.STORE_VERSION + 1}))


def _other_identity(path: pathlib.Path) -> None:
    with Store.open_as_is(path) as store:
        identity, layout = store.identity, store.layout
    shutil.rmtree(path)
    other = dataclasses.replace(identity, weights="other weights")
    Store.open(path, identity=other, layout=layout).close()


def _cut(path: pathlib.Path) -> None:
    file = path / store_header.FILE
    file.write_bytes(file.read_bytes()[:-20])


def _headless(path: pathlib.Path) -> None:
    (path / store_header.FILE).unlink()


def _half(folder: str) -> Callable[[pathlib.Path], None]:
    def delete(path: pathlib.Path) -> None:
        for each in sorted((path / folder).iterdir())[::2]:
            shutil.rmtree(each)

    return delete


def _a_file_for_segments(path: pathlib.Path) -> None:
    shutil.rmtree(path / "segments")
    (path / "segments").write_text("")


@contextlib.contextmanager
def _locked(lab: Lab, path: pathlib.Path) -> Iterator[None]:
    with Store.open_as_is(path, writable=True):
        yield


@contextlib.contextmanager
def _read_only(lab: Lab, path: pathlib.Path) -> Iterator[None]:
    with _as_nobody(path):
        yield


@contextlib.contextmanager
def _as_nobody(path: pathlib.Path) -> Iterator[None]:
    """Whatever is in the folder may be read, and nothing written."""
    for parent in (path, *path.parents[:2]):
        with contextlib.suppress(PermissionError):
            parent.chmod(0o755)
    folders_ = [path, *(x for x in path.rglob("*") if x.is_dir())]
    for folder in folders_:
        folder.chmod(0o555)
    root = os.geteuid() == 0
    try:
        if root:
            os.seteuid(_NOBODY)
        yield
    finally:
        if root:
            os.seteuid(0)
        for folder in folders_:
            if folder.exists():
                folder.chmod(0o755)


def _vanishes(lab: Lab, path: pathlib.Path) -> None:
    """Whatever the engine writes there meanwhile."""
    while path.exists():
        shutil.rmtree(path, ignore_errors=True)


def _loses(folder: str) -> Callable[[Lab, pathlib.Path], None]:
    def lose(lab: Lab, path: pathlib.Path) -> None:
        lab.flush()
        shutil.rmtree(path / folder)

    return lose


def _replaced(lab: Lab, path: pathlib.Path) -> None:
    """Somebody deletes the folder and another process makes a new store there."""
    _vanishes(lab, path)
    Store.open(path, identity=lab.engine.runner.identity, layout=lab.layout).close()


_CASES: dict[str, tuple[_Prepare, Callable[[Lab, pathlib.Path], None]]] = {
    "no store": (_before(_no_store), _nothing),
    "somebody else's": (_before(_somebody_elses), _nothing),
    "a file": (_before(_a_file), _nothing),
    "another version": (_before(_other_version), _nothing),
    "another identity": (_before(_other_identity), _nothing),
    "store.json is cut": (_before(_cut), _nothing),
    "store.json is gone": (_before(_headless), _nothing),
    "half the segments are gone": (_before(_half("segments")), _nothing),
    "half the snapshots are gone": (_before(_half("snapshots")), _nothing),
    "segments is a file": (_before(_a_file_for_segments), _nothing),
    "locked by another writer": (_locked, _nothing),
    "read-only": (_read_only, _nothing),
    "vanishes at work": (_before(lambda path: None), _vanishes),
    "loses its segments at work": (_before(lambda path: None), _loses("segments")),
    "replaced at work": (_before(lambda path: None), _replaced),
}


def _full(lab: Lab, template: pathlib.Path, path: pathlib.Path) -> Case:
    """No file may grow past a few bytes for a while, as on a full disk; then it may again."""
    case = Case(name="full, then not")
    shutil.copytree(template, path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        lab.attach(lab.options(path))
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
        try:
            case.wrong += lab.ask("alone", "first")
            lab.flush()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        case.line = lab.mover.counters.last_error
        case.wrong += [] if case.line else ["nothing was said"]
        lab.clock.added += 2 * PAUSE_S
        lab.forget(Tier.DEVICE)
        case.wrong += lab.ask("alone", "fork")
        lab.flush()
        case.wrong += lab.held()
        store = lab.mover.store
        assert store is not None
        case.wrong += [f"in the store: {x}" for x in store.verify()]
        stored = lab.mover.counters.stored[Tier.DISK]
        case.wrong += [] if stored else ["nothing was stored when there was room again"]
        lab.detach()
    except Exception as error:  # as above
        case.wrong.append(f"{type(error).__name__}: {error}")
        lab.attach(None)
    return case


def _capacity(lab: Lab, path: pathlib.Path) -> Case:
    """The store's own capacity: what is new pushes out what is old."""
    case = Case(name="its capacity is reached")
    try:
        lab.attach(lab.options(path, disk_bytes=60_000))
        for name in ("first", "alone", "tenant", "fork"):
            case.wrong += lab.ask(name)
            lab.flush()
            lab.clock.added += 2 * PAUSE_S
        store = lab.mover.store
        assert store is not None
        case.line = lab.mover.counters.last_error
        case.wrong += lab.held()
        case.wrong += [f"in the store: {x}" for x in store.verify()]
        if store.bytes_used > 60_000:
            case.wrong.append(f"the store has {store.bytes_used} bytes of 60000")
        lab.detach()
        case.line = case.line or "it never was"
    except Exception as error:  # as above
        case.wrong.append(f"{type(error).__name__}: {error}")
        lab.attach(None)
    return case

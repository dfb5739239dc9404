"""Faults happen when they are planned, at places where they make sense, and are counted."""

import errno
import os
import re

import numpy as np
import pytest

from hybridkv.errors import UserError
from hybridkv.tiers import faults
from hybridkv.tiers.faults import NO_FAULTS, SENSIBLE, Fault, Planned, Point, Schedule


def plan(point: Point, fault: Fault, nth: int = 1, **options) -> Schedule:
    return Schedule([Planned(point=point, fault=fault, nth=nth)], **options)


def test_without_faults_data_comes_back_as_it_is():
    data = np.arange(4)
    assert NO_FAULTS.reach(Point.READ_SEGMENT, data) is data
    assert NO_FAULTS.reach(Point.LIST) is None


def test_a_fault_happens_at_its_time_and_every_time_is_counted():
    schedule = plan(Point.READ_SEGMENT, Fault.FLIPPED_BIT, nth=2)
    data = np.zeros(4, np.uint32)
    assert schedule.missed != ()
    read = [schedule.reach(Point.READ_SEGMENT, data) for _ in range(3)]
    assert [int(x.sum()) != 0 for x in read] == [False, True, False]
    assert int(data.sum()) == 0  # the caller's own array is left alone
    assert sum(int(x).bit_count() for x in read[1]) == 1
    assert schedule.reached == {Point.READ_SEGMENT: 3}
    assert schedule.done == [
        Planned(point=Point.READ_SEGMENT, fault=Fault.FLIPPED_BIT, nth=2),
    ]
    assert schedule.missed == ()


def test_every_point_has_faults_and_every_fault_a_point():
    assert set(SENSIBLE) == set(Point)
    assert set().union(*SENSIBLE.values()) == set(Fault)
    assert all(Fault.CRASH in x and Fault.DELAY in x for x in SENSIBLE.values())


def test_a_fault_that_makes_no_sense_is_refused():
    with pytest.raises(UserError, match="makes no sense at LIST"):
        Planned(point=Point.LIST, fault=Fault.SHORT_READ)
    with pytest.raises(UserError, match="first time"):
        Planned(point=Point.LIST, fault=Fault.DELAY, nth=0)
    twice = [Planned(point=Point.LIST, fault=x) for x in (Fault.DELAY, Fault.PERMISSION)]
    with pytest.raises(UserError, match="plan one"):
        Schedule(twice)


@pytest.mark.parametrize(
    ("fault", "code"), [(Fault.NO_SPACE, errno.ENOSPC), (Fault.PERMISSION, errno.EACCES)]
)
def test_an_error_is_the_operating_systems(fault, code):
    with pytest.raises(OSError, match=re.escape(os.strerror(code))) as caught:
        plan(Point.WRITE_SEGMENT, fault).reach(Point.WRITE_SEGMENT)
    assert caught.value.errno == code


def test_bytes_that_were_read_come_short_or_changed():
    data = bytes(range(10))
    assert plan(Point.OPEN, Fault.SHORT_READ).reach(Point.OPEN, data) == data[:5]
    changed = plan(Point.OPEN, Fault.FLIPPED_BIT).reach(Point.OPEN, data)
    assert [i for i in range(10) if changed[i] != data[i]] == [5]
    array = np.arange(6, dtype=np.uint32).reshape(2, 3)
    short = plan(Point.READ_SNAPSHOT, Fault.SHORT_READ).reach(Point.READ_SNAPSHOT, array)
    assert short.size == 3


def test_files_that_were_written_become_short_changed_or_lost(tmp_path):
    def written():
        folder = tmp_path / "folder"
        folder.mkdir(exist_ok=True)
        (folder / "small").write_bytes(b"x")
        (folder / "large").write_bytes(bytes(100))
        return folder

    point = Point.WRITE_SEGMENT
    folder = written()
    plan(point, Fault.SHORT_WRITE).reach(point, path=folder)
    assert (folder / "large").stat().st_size == 50
    folder = written()
    plan(point, Fault.FLIPPED_BIT).reach(point, path=folder)
    assert sum((folder / "large").read_bytes()) == 1
    assert (folder / "small").read_bytes() == b"x"
    plan(point, Fault.LOST_FILE).reach(point, path=folder / "small")
    assert [x.name for x in folder.iterdir()] == ["large"]
    plan(point, Fault.LOST_FILE).reach(point, path=folder)
    assert not folder.exists()


def test_a_reader_is_told_that_its_file_is_lost(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"x")
    with pytest.raises(FileNotFoundError):
        plan(Point.OPEN, Fault.LOST_FILE).reach(Point.OPEN, b"x", file)
    assert not file.exists()
    with pytest.raises(FileNotFoundError):
        plan(Point.DISK_LOAD, Fault.LOST_FILE).reach(Point.DISK_LOAD)


def test_a_delay_sleeps_and_a_crash_kills(monkeypatch):
    slept, killed = [], []
    monkeypatch.setattr(faults.time, "sleep", slept.append)
    plan(Point.PREFETCH, Fault.DELAY, delay_s=3).reach(Point.PREFETCH)
    assert slept == [3]
    monkeypatch.setattr(faults.os, "kill", lambda *_: killed.append(True))
    plan(Point.PREFETCH, Fault.CRASH).reach(Point.PREFETCH)
    assert killed == [True]


def test_a_fault_without_anything_to_change_is_an_error():
    with pytest.raises(UserError, match="give reach"):
        plan(Point.HOST_LOAD, Fault.FLIPPED_BIT).reach(Point.HOST_LOAD)

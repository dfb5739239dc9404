"""Schedules are read from recorded dumps of two small kernels; ``record.py`` there makes them.

Expected numbers are counted by hand in the dumps.
"""

import dataclasses
import sys

import pytest
from places import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts"))

import aot_roofline
import llo_schedule
from llo_schedule import Region
from targets import TARGETS

DUMPS = REPOSITORY / "tests" / "data" / "llo"


def recorded(target: str, kernel: str, units: bool = True) -> llo_schedule.Schedule:
    text = (DUMPS / f"{target}_{kernel}.bundles.txt").read_text()
    used = (DUMPS / f"{target}_{kernel}.units.txt").read_text() if units else ""
    delay = TARGETS[target].delay_slots
    return llo_schedule.parse(text, used, name=kernel, delay_slots=delay)


@pytest.mark.parametrize(
    ("target", "bundles", "loop"), [("v6e", 51, (12, 37)), ("tpu7x", 63, (17, 49))]
)
def test_a_loop_is_from_its_first_bundle_to_its_last_delay_slot(target, bundles, loop):
    schedule = recorded(target, "stream")
    assert schedule.bundles == bundles
    assert [(x.start, x.stop) for x in schedule.loops] == [loop]
    assert schedule.cycles(schedule.loops[0], "most") == loop[1] - loop[0]


@pytest.mark.parametrize("target", ["v6e", "tpu7x"])
def test_copies_have_their_places_and_bytes(target):
    schedule = recorded(target, "stream")
    block, out = 16 * 512 * 2, 16 * 128 * 4  # out has whole registers
    copies = [(x.source, x.target, x.bytes) for x in schedule.dmas]
    assert copies == [("hbm", "vmem", block), ("hbm", "vmem", block), ("vmem", "hbm", out)]
    assert schedule.read_bytes(schedule.loops[0], "steady") == block


def test_a_copy_of_unknown_size_makes_the_sum_unknown():
    text = (DUMPS / "v6e_stream.bundles.txt").read_text()
    schedule = llo_schedule.parse(
        text.replace("/*size_in_granules=*/512,", "/*size_in_granules=*/%s9,"), delay_slots=4
    )
    assert schedule.read_bytes(schedule.loops[0], "steady") is None
    assert aot_roofline.summary(schedule, TARGETS["v6e"])["streaming"] is None


def test_work_of_first_and_last_items_is_not_in_the_steady_path():
    schedule = recorded("v6e", "work")
    (loop,) = schedule.loops
    # The body of an item runs each time; in it, what clears and what divides does not.
    body, clear, divide = sorted(schedule.regions, key=lambda x: x.start)
    assert clear.inside(body)
    assert divide.inside(body)
    steady, most, least = (schedule.cycles(loop, path) for path in ("steady", "most", "least"))
    assert most == loop.bundles
    assert steady == most - clear.bundles - divide.bundles
    assert least == most - body.bundles


def test_without_utilization_a_region_counts_by_its_bundles():
    schedule = recorded("tpu7x", "work", units=False)
    assert schedule.busy(schedule.loops[0], "most") == {}
    assert schedule.cycles(schedule.loops[0], "least") == 45
    assert schedule.cycles(schedule.loops[0], "steady") == 45  # 36 of 81 are not most


def test_units_are_counted_along_the_path():
    schedule = recorded("v6e", "stream")
    busy = schedule.busy(schedule.loops[0], "steady")
    assert busy["VPOP"] == 4.0
    assert busy["MXU"] == 8.0
    assert busy["EUP"] == 0.0


def two_alternatives() -> llo_schedule.Schedule:
    """A loop of 30 bundles: 10 copy a block and compute, 10 compute as much, 10 always run."""
    return llo_schedule.Schedule(
        name="",
        bundles=40,
        loops=(Region(start=0, stop=30),),
        regions=(Region(start=5, stop=15), Region(start=15, stop=25)),
        dmas=(llo_schedule.Dma(bundle=6, source="hbm", target="vmem", bytes=64),),
        units=("VALU", "SALU"),
        capacity=(4, 2),
        used=tuple((4, 0) if 5 <= i < 25 else (0, 2) for i in range(40)),
    )


def test_of_two_alternatives_the_one_that_reads_is_steady():
    schedule = two_alternatives()
    assert schedule.cycles(schedule.loops[0], "steady") == 20
    assert schedule.busy(schedule.loops[0], "steady") == {"VALU": 10.0, "SALU": 10.0}


def test_of_two_alternatives_that_both_read_the_longer_one_is_steady():
    """Another that reads as much but hardly works, such as copies by themselves, runs as well."""
    read = [llo_schedule.Dma(bundle=i, source="hbm", target="vmem", bytes=64) for i in (6, 16, 26)]
    schedule = dataclasses.replace(
        two_alternatives(),
        regions=(Region(start=5, stop=14), *(Region(start=i, stop=i + 10) for i in (15, 25))),
        loops=(Region(start=0, stop=36),),
        dmas=tuple(read),
    )
    assert schedule.cycles(schedule.loops[0], "steady") == 36 - 9
    assert schedule.read_bytes(schedule.loops[0], "steady") == 2 * 64


def test_an_inner_loop_is_not_part_of_the_outer_ones_body():
    outer, inner = Region(start=0, stop=30), Region(start=10, stop=14)
    schedule = llo_schedule.Schedule(name="", bundles=30, loops=(inner, outer), regions=(), dmas=())
    assert schedule.cycles(outer, "most") == 26
    assert schedule.cycles(inner, "most") == 4


def test_the_roofline_is_bytes_over_bundles():
    v6e = TARGETS["v6e"]
    loop = aot_roofline.summary(recorded("v6e", "stream"), v6e)["streaming"]
    cycles = 16384 / (1640e9 / 1.75e9)
    assert loop["memory_cycles"] == pytest.approx(cycles, abs=0.1)
    assert loop["fraction"] == pytest.approx(cycles / 25, abs=1e-3)
    assert loop["bound"] == "latency"


def test_a_loop_faster_than_its_bytes_is_bound_by_memory():
    slow = aot_roofline.summary(recorded("tpu7x", "stream"), TARGETS["v5e"])["streaming"]
    assert slow["fraction"] < 1
    assert slow["bound"] == "scalar"
    schedule = two_alternatives()
    dmas = (llo_schedule.Dma(bundle=6, source="hbm", target="vmem", bytes=1 << 20),)
    loop = aot_roofline.summary(
        llo_schedule.Schedule(
            name="", bundles=40, loops=schedule.loops, regions=schedule.regions, dmas=dmas
        ),
        TARGETS["v6e"],
    )["streaming"]
    assert (loop["fraction"], loop["bound"]) == (1.0, "memory")


def test_a_loop_that_only_copies_runs_as_often_as_what_is_waited_for_takes():
    outer, copying = Region(start=0, stop=30), Region(start=4, stop=9)
    schedule = llo_schedule.Schedule(
        name="",
        bundles=30,
        loops=(copying, outer),
        regions=(),
        dmas=(llo_schedule.Dma(bundle=5, source="hbm", target="vmem", bytes=1000),),
        waits=((12, 4000),),
        units=("VALU", "SALU"),
        capacity=(4, 2),
        used=tuple((4, 0) if i >= 12 else (0, 2) for i in range(30)),
    )
    loop = aot_roofline.summary(schedule, TARGETS["v6e"])["streaming"]
    assert (loop["start"], loop["copy_loops"], loop["copy_loop_trips"]) == (0, 1, 4)
    assert loop["read_bytes"] == 4000
    assert loop["steady"] == 25 + 4 * 5


@pytest.mark.parametrize("target", ["v6e", "tpu7x"])
def test_waits_have_their_bytes(target):
    schedule = recorded(target, "stream")
    assert schedule.waited_bytes(schedule.loops[0], "most") == 16 * 512 * 2


def test_dumps_that_do_not_belong_together_are_refused():
    text = (DUMPS / "v6e_stream.bundles.txt").read_text()
    units = (DUMPS / "v6e_work.units.txt").read_text()
    with pytest.raises(ValueError, match="51 bundles, but utilization of 101"):
        llo_schedule.parse(text, units, delay_slots=4)
    with pytest.raises(ValueError, match="not a final_bundles dump"):
        llo_schedule.parse("nothing", delay_slots=4)
    lines = text.splitlines(keepends=True)
    cut = "".join(line for line in lines if not line.lstrip().startswith("0x9 "))
    with pytest.raises(ValueError, match="not whole"):
        llo_schedule.parse(cut, delay_slots=4)


def test_a_folder_gives_its_kernels_and_no_xla_operation(tmp_path):
    bundles = (DUMPS / "v6e_stream.bundles.txt").read_text()
    units = (DUMPS / "v6e_stream.units.txt").read_text()
    calls = {"stream.1": "tpu_custom_call", "fusion.2": "fusion", "TLP": "tpu_custom_call"}
    for name, call in calls.items():
        for part, text in (
            ("01-final_hlo-static-per-bundle-utilization", units),
            ("02-schedule-analysis_final_bundles", f"100 %: {name} = {call}"),
            ("03-final_bundles", bundles),
        ):
            (tmp_path / f"17-{name}-{part}.txt").write_text(text)
    (kernel,) = llo_schedule.read(tmp_path, delay_slots=4)
    assert (kernel.name, kernel.bundles, len(kernel.used)) == ("stream.1", 51, 51)

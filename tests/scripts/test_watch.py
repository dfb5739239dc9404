"""The live view: text on standard output is never touched, and a file gets no escape codes."""

import io
import re
import sys

import pytest
from places import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts"))

import decode
import watch

from hybridkv.blocks.entries import Form, Tier
from hybridkv.engine.accounts import PromptTotals
from hybridkv.engine.counters import EngineCounters
from hybridkv.engine.scheduler import Stage
from hybridkv.kinds import Kind
from hybridkv.observe import view
from hybridkv.observe.numbers import Numbers, PoolNumbers
from hybridkv.prefixes.losses import Cause
from hybridkv.tiers.counters import TierCounters

KINDS = {Kind.COMPRESSED: 600, Kind.INDEXER: 400, Kind.WINDOW: 2000, Kind.TAIL: 50}


def numbers(taken=0.0, new=0):
    pool = PoolNumbers(capacity=10, used=5, reserved=1, published=4, idle=4, evictable=4)
    prompts = PromptTotals(
        prompts=2,
        tokens=1500,
        ideal=900,
        reused=700,
        lost={(Cause.NO_SNAPSHOT, Kind.WINDOW): 150, (Cause.ALIGNMENT, None): 50},
        hit={Kind.COMPRESSED: 750},
        replayed={Kind.WINDOW: 30, Kind.TAIL: 30},
        restored={(Kind.COMPRESSED, Tier.DISK): 256},
    )
    return Numbers(
        taken=taken,
        counters=EngineCounters(new_tokens=new, prompts=prompts),
        tiers=TierCounters(),
        stages=dict.fromkeys(Stage, 0) | {Stage.DECODING: 2, Stage.WAITING: 1},
        slots=4,
        free_slots=2,
        idle_queue=0,
        store_queues={},
        pools={(form, tier): pool for form in Form for tier in (Tier.DEVICE, Tier.DISK)},
        block_tokens=16,
        place_bytes=KINDS,
        raw_token_bytes=5000,
        store_bytes=10_000,
    )


class Engine:
    def __init__(self):
        self.on_turn = []


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Screen:
    """So much of a terminal as the view uses: a cursor, a scrolling region, two saved numbers."""

    def __init__(self, rows, columns):
        self.rows, self.columns, self.bottom = rows, columns, rows
        self.lines = [[" "] * columns for _ in range(rows)]
        self.row = self.column = 0
        self.saved = (0, 0)

    def feed(self, text):
        for code, char in re.findall(r"(\x1b\[[\d;]*[A-Za-z]|\x1b[78])|(.|\n)", text):
            self.code(code) if code else self.char(char)

    def char(self, char):
        if char != "\n":
            if self.column == self.columns:
                self.char("\n")
            self.lines[self.row][self.column] = char
            self.column += 1
            return
        self.column = 0  # as a terminal's driver does
        if self.row == self.bottom - 1:
            self.lines.insert(self.bottom, [" "] * self.columns)
            del self.lines[0]
        else:
            self.row += 1

    def code(self, code):
        if code in ("\x1b7", "\x1b8"):
            if code == "\x1b7":
                self.saved = self.row, self.column
            else:
                self.row, self.column = self.saved
            return
        values, what = [int(x) for x in code[2:-1].split(";") if x], code[-1]
        if what == "r":
            assert values[0] == 1
            self.bottom, self.row, self.column = values[1], 0, 0
        elif what == "A":
            self.row = max(self.row - values[0], 0)
        elif what == "H":
            self.row, self.column = values[0] - 1, values[1] - 1
        elif code == "\x1b[2K":
            self.lines[self.row] = [" "] * self.columns
        elif code == "\x1b[J":
            self.lines[self.row][self.column :] = " " * (self.columns - self.column)
            for row in range(self.row + 1, self.rows):
                self.lines[row] = [" "] * self.columns
        else:
            raise AssertionError(f"{code!r} is not known")

    def text(self):
        return ["".join(line).rstrip() for line in self.lines]


@pytest.fixture
def looks(monkeypatch):
    """Each look at the engine is half a second later, and 50 tokens further."""
    seen = []

    def measure(engine):
        seen.append(numbers(0.5 * len(seen), 50 * len(seen)))
        return seen[-1]

    monkeypatch.setattr(watch, "measure", measure)
    return seen


@pytest.fixture
def screen(monkeypatch):
    monkeypatch.setenv("COLUMNS", "90")
    monkeypatch.setenv("LINES", "24")
    monkeypatch.setenv("TERM", "xterm")
    return Screen(24, 90)


def shown(terminal, screen):
    screen.feed(terminal.getvalue())
    terminal.truncate(0)
    terminal.seek(0)


def test_a_file_gets_plain_lines_a_few_seconds_apart(looks):
    engine, out, time = Engine(), io.StringIO(), [0.0]
    view_ = watch.Watch(engine, out, clock=lambda: time[0])
    view_.start()
    for _ in range(50):
        time[0] += 0.1
        for tell in engine.on_turn:
            tell()
    view_.stop()
    assert engine.on_turn == []
    lines = out.getvalue().splitlines()
    assert len(lines) == 4  # at 0.1, 2.1 and 4.1 s, and at the end
    assert "\x1b" not in out.getvalue()
    assert lines[-1].startswith("100.0 tokens/s | 1 waiting, 2 decoding | 1,500 prompt, 900 ideal")
    assert "700 reused, 256 brought, 30 replayed, 200 lost" in lines[-1]
    assert lines[-1].endswith("blocks device 50% disk 50%")


def test_text_scrolls_above_the_view_and_is_not_cut(looks, screen):
    engine, terminal, time = Engine(), Terminal(), [0.0]
    height = view.height(numbers()) + 1
    screen.feed("".join(f"before {n}\n" for n in range(22)))
    view_ = watch.Watch(engine, terminal, clock=lambda: time[0])
    view_.start()
    shown(terminal, screen)
    for n in range(30):
        screen.feed(f"text {n} ")  # the engine's, on standard output, without an end of line
        time[0] += 1.0
        engine.on_turn[0]()
        shown(terminal, screen)
        screen.feed("goes on\n")
    lines = screen.text()
    kept = 24 - height
    assert lines[kept - 2 : kept - 1] == ["text 29 goes on"]
    assert lines[0] == f"text {30 - kept + 1} goes on"
    assert "tokens/s" in lines[kept + 1]
    assert lines[kept] == "\u2500" * 90
    assert lines[-1].startswith("tail")
    view_.stop()
    shown(terminal, screen)
    screen.feed("report\n")
    lines = screen.text()
    assert screen.bottom == 24
    after = lines.index("text 29 goes on")
    assert lines[after + 1].startswith("100.0 tokens/s")
    assert "report" in lines[after + 2 : after + 4]
    assert not any(line.startswith("tail") for line in lines)


def test_a_small_terminal_gets_lines(looks, screen, monkeypatch):
    monkeypatch.setenv("LINES", "12")
    engine, terminal = Engine(), Terminal()
    with watch.watching(engine, on=True, stream=terminal):
        engine.on_turn[0]()
    assert "\x1b" not in terminal.getvalue()
    assert terminal.getvalue().count("tokens/s") == 2


def test_the_lines_are_given_back_when_decoding_fails(looks, screen):
    engine, terminal = Engine(), Terminal()
    with pytest.raises(KeyboardInterrupt), watch.watching(engine, on=True, stream=terminal):
        raise KeyboardInterrupt
    shown(terminal, screen)
    assert screen.bottom == 24
    assert engine.on_turn == []


def test_without_the_option_nothing_is_attached(looks):
    engine = Engine()
    with watch.watching(engine, on=decode.parse(["a prompt"]).watch):
        assert engine.on_turn == []
    assert decode.parse(["a prompt", "--watch"]).watch
    assert looks == []


def test_the_view_names_kinds_tiers_losses_and_bytes():
    from rich.console import Console

    console = Console(file=io.StringIO(), width=100)
    console.print(view.render(numbers(1.0, 30), view.Rates.between(numbers(), numbers(1.0, 30))))
    text = console.file.getvalue()
    assert "30.0 tokens/s" in text
    assert "lost: 150 no_snapshot (window), 50 alignment" in text
    for kind, size in (("compressed", "3.0 kB"), ("indexer", "2.0 kB"), ("window", "10.0 kB")):
        (line,) = (line for line in text.splitlines() if line.startswith(kind))
        assert line.count(size) == 2  # device and disk
        assert "50%" in line
    assert len(text.splitlines()) == view.height(numbers())

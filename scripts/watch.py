r"""A live view of an engine on standard error, below the text on standard output.

    text, text, text         scrolls in the upper part of the terminal
    ----------------
    12.3 tokens/s  ...       the lowest lines, redrawn a few times a second

Nothing of standard output is touched: the terminal is told to scroll only its upper lines. Where
standard error is no terminal, plain lines without any escape code are written instead. Everything
happens between turns on the engine's thread, so that no text is ever cut in two.
"""

import contextlib
import io
import sys
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from rich.console import Console

from hybridkv.engine.engine import Engine
from hybridkv.observe import view
from hybridkv.observe.numbers import Numbers, measure

EVERY_S, LINE_EVERY_S = 0.25, 2.0
"""Between two drawings, and between two lines where there is no terminal."""
FEWEST_LINES = 6
"""Of text that must be left above the view; a smaller terminal gets plain lines."""


class Watch:
    """Draws one engine."""

    def __init__(
        self,
        engine: Engine,
        stream: TextIO | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Draws nothing yet.

        Args:
          engine: whose numbers.
          stream: where to; standard error.
          clock: seconds.
        """
        self._engine, self._clock = engine, clock
        self._stream = stream if stream is not None else sys.stderr
        self._console = Console(file=self._stream)
        self._before: Numbers | None = None
        self._next = -float("inf")
        self._height = 0
        """Lines that are taken from the text; 0 where plain lines are written."""

    def start(self) -> None:
        """Takes the lowest lines, and draws after every turn that comes late enough."""
        numbers = measure(self._engine)
        height = view.height(numbers) + 1
        rows = self._console.size.height
        if self._console.is_terminal and rows >= height + FEWEST_LINES:
            self._height = height
            # Scroll up by the view's lines, keep the rest for the text, return to where it was.
            self._write("\n" * height + "\x1b7" + f"\x1b[1;{rows - height}r" + "\x1b8")
            self._write(f"\x1b[{height}A")
        self._engine.on_turn.append(self.turn)

    def turn(self) -> None:
        """After a turn."""
        now = self._clock()
        if now >= self._next:
            self._next = now + (EVERY_S if self._height else LINE_EVERY_S)
            self.draw()

    def draw(self) -> None:
        """Draws the numbers of now."""
        numbers = measure(self._engine)
        rates = view.Rates.between(self._before, numbers)
        self._before = numbers
        if not self._height:
            self._write(view.line(numbers, rates) + "\n")
            return
        size = self._console.size
        lines = self._lines(numbers, rates, size.width)
        drawn = [f"\x1b[{size.height - self._height + 1 + n};1H\x1b[2K{x}" for n, x in lines]
        self._write("\x1b7" + "".join(drawn) + "\x1b8")

    def _lines(self, numbers: Numbers, rates: view.Rates, width: int) -> list[tuple[int, str]]:
        buffer = io.StringIO()
        console = Console(file=buffer, width=width, force_terminal=False)
        console.print("\u2500" * width)
        console.print(view.render(numbers, rates))
        return list(enumerate(buffer.getvalue().splitlines()[: self._height]))

    def stop(self) -> None:
        """A last drawing, which stays, below the text; gives the lines back."""
        if self.turn in self._engine.on_turn:
            self._engine.on_turn.remove(self.turn)
        if not self._height:
            self.draw()
            return
        rows, self._height = self._console.size.height, 0
        # The whole terminal scrolls again, and the lines of the view are cleared.
        self._write("\x1b7" + f"\x1b[1;{rows}r" + "\x1b8" + "\x1b[J")
        self.draw()

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


@contextlib.contextmanager
def watching(engine: Engine, *, on: bool, stream: TextIO | None = None) -> Iterator[None]:
    """A view while something runs, if it is ``on``."""
    if not on:
        yield
        return
    watch = Watch(engine, stream)
    watch.start()
    try:
        yield
    finally:
        watch.stop()

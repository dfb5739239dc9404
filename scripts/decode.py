"""Decodes with a DeepSeek-V4 or Llama checkpoint, on whatever device JAX finds.

    python scripts/decode.py "ROMEO"
    python scripts/decode.py --file data/scene.txt --max-new-tokens 400 --temperature 0.8
    python scripts/decode.py --prompts prompts.txt --scheme hybrid
    python scripts/decode.py --model smollm2 --file notes.txt --ask "Who?" --ask "When?"
    python scripts/decode.py --model smollm2 --conversation turns.txt
    python scripts/decode.py --file data/scene.txt --store ~/prefixes    # twice: the second reuses

One prompt is printed as it comes. Several (``--prompts``, a line each; ``--ask``, questions on the
same ``--file``) run together. A conversation runs turn by turn, each prompt being all that was said
before. What each request reused, computed and lost is reported at the end.
"""

import argparse
import dataclasses
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import command_line
import decode_models
import decode_prompts
import numpy as np
import watch
from decode_prompts import Prompt
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hybridkv.engine.engine import Engine, EngineOptions
from hybridkv.engine.generate import check_prompt, default_options
from hybridkv.engine.generated import Publish
from hybridkv.engine.requests import Finish, Output, Request
from hybridkv.engine.runner import RunnerOptions
from hybridkv.engine.sampling import SamplingOptions
from hybridkv.errors import UserError
from hybridkv.state.capacity import Capacity
from models.text import Text

COLUMNS = ["request", "prompt", "reused", "replayed", "computed"]
COLUMNS += ["first, ms", "new", "tokens/s"]


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prompt", nargs="?", help="prompt text; - reads standard input")
    parser.add_argument("--file", type=pathlib.Path, help="file with the prompt's text")
    parser.add_argument("--token-ids", help="prompt as comma-separated token ids; ids come out")
    parser.add_argument("--prompts", type=pathlib.Path, help="file of prompts, text or .jsonl")
    parser.add_argument("--conversation", type=pathlib.Path, help="what a user says, a turn a line")
    parser.add_argument("--ask", action="append", help="a question on --file; may be repeated")
    decode_models.add_arguments(parser)
    parser.add_argument("--store", type=pathlib.Path, help="folder of prefixes that outlive this")
    parser.add_argument("--host-tokens", type=int, default=0, help="room in host memory")
    parser.add_argument(
        "--scheme",
        choices=decode_models.SCHEMES,
        default="hybrid",
        help="five kinds of state, uniform raw rows, or no reuse at all",
    )
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--slots", type=int, help="requests that run at once")
    parser.add_argument("--samples", type=int, default=1, help="outputs of each prompt")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the likeliest token")
    parser.add_argument("--top-k", type=int, default=0, help="0: all tokens")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--min-p", type=float, default=0.0)
    parser.add_argument("--repetition-penalty", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stop", action="append", default=[], help="text that ends an output")
    parser.add_argument("--publish", choices=[x.value for x in Publish], default="canonical")
    parser.add_argument("--echo", action="store_true", help="print the prompt first")
    parser.add_argument("--watch", action="store_true", help="a live view on standard error")
    parser.add_argument("--stats-json", metavar="FILE", help="write the statistics here too")
    return parser.parse_args(argv)


def check_arguments(args: argparse.Namespace) -> None:
    """Refuses what contradicts itself.

    Raises:
      UserError: no prompt or several kinds of them, or a size below 1.
    """
    given = [args.prompt, args.token_ids, args.prompts, args.conversation, args.file]
    if sum(x is not None for x in given) != 1:
        raise UserError(
            "give one prompt: as text, with --file or with --token-ids; or several with --prompts, "
            "or a --conversation"
        )
    if args.ask and args.file is None:
        raise UserError("--ask asks about a document: name it with --file")
    own = {"samples": 1, "slots": 1, "host_tokens": 0}
    command_line.check_least(args, decode_models.LEAST | own)


class Session:
    """One command: a model, its engine, and how requests are made."""

    def __init__(self, args: argparse.Namespace) -> None:
        began = time.perf_counter()
        self.args = args
        self.sampling = SamplingOptions(
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            min_p=args.min_p,
            repetition_penalty=args.repetition_penalty,
            seed=args.seed,
        )
        self.turns: list[str] = []
        self.runtime, self.text = decode_models.load(args)
        if args.chat is None:
            args.chat = self.text is not None and self.text.chats
        self.prompts = self._prompts()
        for prompt in self.prompts:  # before anything is compiled
            check_prompt(
                self.runtime,
                prompt.ids,
                max_new_tokens=prompt.max_new_tokens or args.max_new_tokens,
                capacity_tokens=args.context,
            )
        self.engine = self._engine()
        self.start_seconds = time.perf_counter() - began

    def _prompts(self) -> list[Prompt]:
        args = self.args
        if args.conversation is not None:
            self.turns = decode_prompts.turns(args.conversation)
            return []
        if args.prompts is not None:
            return decode_prompts.several(args.prompts, self._tokenizer, chat=args.chat)
        if args.ask:
            document = decode_prompts.read_text(args.file)
            return decode_prompts.questions(document, args.ask, self._tokenizer, chat=args.chat)
        return [decode_prompts.single(args, self.text)]

    @property
    def _tokenizer(self) -> Text:
        assert self.text is not None  # loaded wherever there are no token ids
        return self.text

    def _engine(self) -> Engine:
        args, geometry = self.args, self.runtime.geometry
        options = default_options(self.runtime)
        if args.tile:
            options = dataclasses.replace(options, tile=args.tile)
        slots = args.slots or min(max(len(self.prompts) * args.samples, 1), 8)
        one = Capacity.for_tokens(geometry, tokens=args.context + options.tile)
        # One sequence's room beyond what runs, for what is stored.
        capacity = dataclasses.replace(one, slots=slots, blocks=one.blocks * (slots + 1))
        sizes = RunnerOptions(
            capacity=capacity,
            snapshots=args.snapshots,
            reuse=args.scheme != "off",
            tiers=decode_models.tiers(args, self.runtime, args.store),
        )
        engine = EngineOptions(publish=Publish(args.publish))
        return Engine(self.runtime, options, sizes, engine, text=self.text)

    def request(self, ids: np.ndarray, max_new_tokens: int | None = None) -> Request:
        """A request with the command line's options."""
        chat = self.text is not None and self.args.chat
        return Request(
            prompt=ids,
            max_new_tokens=max_new_tokens or self.args.max_new_tokens,
            sampling=self.sampling,
            samples=self.args.samples,
            stop=tuple(self.args.stop),
            stop_tokens=tuple(self._tokenizer.stop_tokens) if chat else (),
        )

    def stream(self, prompt: Prompt) -> list[tuple[str, Output]]:
        """Prints one prompt's first output as it comes."""
        if self.args.echo and self.text is not None:
            reader = self.text.stream()
            print("".join(reader.feed(int(t)) for t in prompt.ids), end="")
        handle = self.engine.submit(self.request(prompt.ids, prompt.max_new_tokens))
        for piece in handle.pieces():
            print(f"{piece.token} " if self.text is None else piece.text, end="", flush=True)
        print(handle.output.last_text)
        handle.result()
        for number, output in enumerate(handle.outputs[1:], start=2):
            print(f"--- {number}\n{output.text if self.text else output.tokens}")
        return [(prompt.title, output) for output in handle.outputs]

    def together(self) -> list[tuple[str, Output]]:
        """Runs all prompts at once behind a progress bar, then prints what they gave."""
        requests = [self.request(x.ids, x.max_new_tokens) for x in self.prompts]
        titles = [x.title for x in self.prompts for _ in range(self.args.samples)]
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        console = Console(stderr=True)
        watched = self.args.watch  # it shows more, and has the terminal's lines
        with Progress(*columns, console=console, transient=True, disable=watched) as bar:
            task = bar.add_task("requests", total=len(titles))
            outputs = self.engine.run(requests, progress=lambda _: bar.advance(task))
        rows = list(zip(titles, outputs, strict=True))
        for title, output in rows:
            print(f"--- {title}\n{output.text if self.text else output.tokens}")
        return rows

    def converse(self) -> list[tuple[str, Output]]:
        """Runs a conversation turn by turn; what was said is published in between."""
        text, rows = self._tokenizer, []
        messages: list[dict[str, str]] = []
        so_far = np.zeros(0, np.int32)
        for said in self.turns:
            if self.args.chat:
                messages.append({"role": "user", "content": said})
                ids = text.encode_chat(messages, after=so_far if len(so_far) else None)
            else:
                ids = np.concatenate([so_far, text.encode(f"{said}\n")])
            print(f">>> {said}")
            rows += self.stream(Prompt(ids=ids, title=decode_prompts.shorten(said)))
            output = rows[-self.args.samples][1]
            messages.append({"role": "assistant", "content": output.text})
            so_far = np.concatenate([ids, np.asarray(output.tokens, np.int32)])
            self.engine.drain()  # while the user reads
        return rows

    def run(self) -> list[tuple[str, Output]]:
        """All that the command line asks for."""
        if self.args.conversation is not None:
            return self.converse()
        return self.together() if len(self.prompts) > 1 else self.stream(self.prompts[0])


def report(session: Session, rows: Sequence[tuple[str, Output]]) -> dict[str, Any]:
    """Everything about the run, for people (on standard error) and for ``--stats-json``."""
    geometry = session.runtime.geometry
    first = rows[0][1]
    held = geometry.cache_bytes(first.prompt_tokens + len(first.tokens))
    bytes_held = {kind.value: size for kind, size in held.items()}
    requests = [_fields(title, output) for title, output in rows]
    console = Console(stderr=True)
    command_line.print_table(
        f"\n{command_line.device_name()}, scheme {session.args.scheme}, generated tokens published "
        f"{session.args.publish} (loading and compiling {session.start_seconds:.1f} s)",
        COLUMNS,
        [
            (
                row["title"],
                *(row[key] for key in ("prompt_tokens", "reused", "replayed", "computed")),
                f"{row['time_to_first_token_s'] * 1e3:.0f}",
                row["new_tokens"],
                f"{row['decode_tokens_per_second']:.1f}",
            )
            for row in requests
        ],
        console=console,
    )
    for row in requests:
        if row["why"]:
            console.print(f"{row['title']}: {row['why']}", style="dim", highlight=False)
    kinds = ", ".join(f"{kind} {size:,}" for kind, size in bytes_held.items())
    print(f"cache bytes by kind: {kinds}", file=sys.stderr)
    return {
        "device": command_line.device_name(),
        "scheme": session.args.scheme,
        "publish": session.args.publish,
        "start_seconds": round(session.start_seconds, 3),
        "cache_bytes": bytes_held,
        "compilations": session.engine.counters.compilations,
        **{k: v for k, v in requests[0].items() if k not in ("title", "why")},
        "requests": requests,
    }


def _fields(title: str, output: Output) -> dict[str, Any]:
    why = output.reason
    if output.plan is not None and not why:
        why = output.plan.explain()
        if output.loaded:
            why += f"; {output.loaded} tokens came from other tiers"
    return {
        "title": title,
        "prompt_tokens": output.prompt_tokens,
        "loaded": output.loaded,
        "reused": output.reused,
        "replayed": output.replayed,
        "computed": output.computed,
        "new_tokens": len(output.tokens),
        "time_to_first_token_s": output.first_token_s,
        "decode_tokens_per_second": round(output.decode_tokens_per_second, 2),
        "finish": output.finish.value if output.finish else None,
        "exact": output.exact,
        "why": why,
    }


def main() -> int:
    """Loads, checks, generates, reports."""
    args = parse(sys.argv[1:])
    check_arguments(args)
    command_line.use_compilation_cache()
    session = Session(args)
    with watch.watching(session.engine, on=args.watch):
        rows = session.run()
    if not session.engine.close():
        print("not everything was stored", file=sys.stderr)
    command_line.write_json(args.stats_json, report(session, rows))
    return 1 if any(output.finish is Finish.FAILED for _, output in rows) else 0


if __name__ == "__main__":
    command_line.run(main)

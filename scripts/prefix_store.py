"""Looks into a store of prefixes, checks it, fills it, and makes it smaller.

  prefix_store.py list PATH                            what is stored
  prefix_store.py inspect PATH ID                      one extension, by the beginning of its id
  prefix_store.py verify PATH                          reads every byte; exit status 1 on problems
  prefix_store.py prune PATH --to-bytes 40000000000    leaves first, of those the oldest
  prefix_store.py prune PATH --older-than 86400        seconds since it was written
  prefix_store.py prune PATH --damaged                 what verify finds that can't be used
  prefix_store.py prewarm PATH --prompts FILE          computes prompts and stores them

Only ``prewarm`` needs a model, and takes the options of decode.py for it: a store says itself what
it belongs to. A store that an engine writes to can be listed, inspected and verified at the same
time, but not pruned or filled. Prefixes of another model, layout or numerics can't be converted:
prewarm a new store with the prompts that matter.
"""

import argparse
import contextlib
import dataclasses
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import command_line
import decode_models
import decode_prompts
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from hybridkv.blocks.entries import Tier
from hybridkv.engine.generate import default_options
from hybridkv.engine.runner import Runner, RunnerOptions
from hybridkv.state.capacity import Capacity
from hybridkv.tiers.store import Store
from hybridkv.tiers.store import verify as store_verify
from hybridkv.tiers.store.folder import Folder
from hybridkv.tiers.store.prune import prune
from hybridkv.tiers.store.records import Problem, StoredExtension, StoreError

_FLUSH_S = 120.0
"""Seconds that one prompt may take to be written."""


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, help_ in (
        ("list", "what is stored"),
        ("inspect", "one extension"),
        ("verify", "reads every byte; exit status 1 on problems"),
        ("prune", "makes the store smaller"),
        ("prewarm", "computes prompts and stores them"),
    ):
        command = commands.add_parser(name, help=help_)
        command.add_argument("path", type=pathlib.Path, help="folder of the store")
        if name == "inspect":
            command.add_argument("id", help="of the extension, or its beginning")
        if name == "prune":
            command.add_argument("--to-bytes", type=int, help="at most so many bytes stay")
            command.add_argument("--older-than", type=float, metavar="SECONDS")
            command.add_argument(
                "--damaged", action="store_true", help="reads every byte; what can't be used goes"
            )
        if name == "prewarm":
            command.add_argument(
                "--prompts", type=pathlib.Path, required=True, help="text, a line each, or .jsonl"
            )
            decode_models.add_arguments(command)
        command.add_argument("--json", metavar="FILE", help="write the result here too")
    return parser.parse_args(argv)


def list_(args: argparse.Namespace) -> int:
    """Prints every extension as the prefix that ends with it."""
    with Store.open_as_is(args.path) as store:
        rows = [_row(store, extension) for extension in store.extensions()]
        problems = [str(problem) for problem in store.problems]
        total = {
            "bytes": store.bytes_used,
            "blocks": store.blocks,
            "snapshots": store.snapshots,
        }
    columns = ["id", "goes on from", "tokens", "blocks", "snapshots", "bytes", "written"]
    command_line.print_table(
        f"{args.path}: {total['blocks']:,} blocks, {total['snapshots']:,} snapshots, "
        f"{total['bytes']:,} bytes",
        columns,
        [[f"{x:,}" if isinstance(x, int) else x for x in row.values()] for row in rows],
        console=Console(width=None if sys.stdout.isatty() else 160),
    )
    if problems:
        print(f"{len(problems)} manifests can't be used: see verify")
    command_line.write_json(args.json, {"extensions": rows, **total, "problems": problems})
    return 0


def _row(store: Store, extension: StoredExtension) -> dict[str, Any]:
    inner = extension.extension
    owner = store.owner(inner.parent)
    return {
        "id": extension.id,
        "parent": owner[:8] if owner else "-",
        "tokens": inner.end * store.layout.block_tokens,
        "blocks": inner.blocks,
        "snapshots": len(inner.snapshots),
        "bytes": store.extension_bytes(extension.id),
        "written": _time(extension.written),
    }


def inspect(args: argparse.Namespace) -> int:
    """Prints everything about one extension."""
    with Store.open_as_is(args.path) as store:
        found = [x for x in store.extensions() if x.id.startswith(args.id)]
        if len(found) != 1:
            raise StoreError(
                f"{len(found)} extensions have an id that begins with {args.id!r}: "
                "take one from prefix_store.py list"
            )
        extension, layout = found[0].extension, store.layout
        told: dict[str, Any] = {
            "id": found[0].id,
            "written": _time(found[0].written),
            "root": extension.root.hex(),
            "parent": extension.parent.hex(),
            "tokens": [extension.first * layout.block_tokens, extension.end * layout.block_tokens],
            "blocks": extension.blocks,
            "snapshots at": [at.position for at in extension.snapshots],
            "snapshot folders": list(found[0].snapshot_ids),
            "segments": sorted({place.segment for place in found[0].blocks}),
            "bytes": store.extension_bytes(found[0].id),
            "block words": {k.value: [s.start, s.stop] for k, s in layout.block_spans.items()},
            "snapshot words": {
                k.value: [s.start, s.stop] for k, s in layout.snapshot_spans.items()
            },
            "last digest": extension.digests[-1].tobytes().hex() if extension.blocks else "-",
        }
        identity = store.identity
    told |= {name: _short(getattr(identity, name)) for name in ("weights", "layout", "numerics")}
    for name, value in told.items():
        for line in value if isinstance(value, list) and name.endswith("s") else [value]:
            print(f"{name:18} {line}")
    command_line.write_json(args.json, told)
    return 0


def verify(args: argparse.Namespace) -> int:
    """Reads every byte of every file; a line for each problem."""
    folder = Folder(args.path.absolute())
    with _progress("bytes") as advance:
        problems: list[Problem] = store_verify.verify(folder, advance)
    for problem in problems:
        print(problem)
    if not problems:
        print(f"{args.path}: {sum(folder.sizes().values()):,} bytes, no problems")
    command_line.write_json(args.json, [str(problem) for problem in problems])
    return 1 if problems else 0


def prune_(args: argparse.Namespace) -> int:
    """Removes extensions, or what is damaged."""
    if args.to_bytes is None and args.older_than is None and not args.damaged:
        raise StoreError("nothing to prune: give --to-bytes, --older-than or --damaged")
    for name in ("to_bytes", "older_than"):
        if (getattr(args, name) or 0) < 0:
            raise StoreError(f"--{name.replace('_', '-')} must be at least 0")
    extensions = freed = 0
    with Store.open_as_is(args.path, writable=True) as store:
        if args.damaged:
            with _progress("bytes") as advance:
                freed += store.discard_problems(advance)
        if args.to_bytes is not None or args.older_than is not None:
            with _progress("extensions") as advance:
                pruned = prune(
                    store,
                    to_bytes=args.to_bytes,
                    older_than_s=args.older_than,
                    progress=advance,
                )
            extensions, freed = pruned.extensions, freed + pruned.bytes
        left = store.bytes_used
    print(f"{args.path}: {extensions:,} extensions removed, {freed:,} bytes freed, {left:,} left")
    command_line.write_json(
        args.json, {"extensions": extensions, "bytes_freed": freed, "bytes_left": left}
    )
    return 0


def prewarm(args: argparse.Namespace) -> int:
    """Computes every prompt of a file that is not stored yet, and stores it."""
    command_line.check_least(args, decode_models.LEAST)
    command_line.use_compilation_cache()
    args.scheme, args.token_ids = "hybrid", None
    runtime, text = decode_models.load(args)
    assert text is not None
    chat = text.chats if args.chat is None else args.chat
    prompts = decode_prompts.several(args.prompts, text, chat=chat)
    options = default_options(runtime)
    if args.tile:
        options = dataclasses.replace(options, tile=args.tile)
    capacity = Capacity.for_tokens(runtime.geometry, tokens=args.context + options.tile)
    tiers = decode_models.tiers(args, runtime, args.path)
    sizes = RunnerOptions(capacity=capacity, snapshots=args.snapshots, tiers=tiers, ledger=False)
    runner = Runner(runtime, options, sizes)
    assert runner.mover is not None
    computed = total = 0
    with _progress("tokens") as advance:
        tokens = sum(len(prompt.ids) for prompt in prompts)
        for prompt in prompts:
            sequence = runner.start(prompt.ids)
            runner.prefill(sequence)
            computed += len(prompt.ids) - sequence.start
            runner.finish(sequence)
            runner.mover.flush(timeout_s=_FLUSH_S)
            total += len(prompt.ids)
            advance(total, tokens)
    whole = runner.close(timeout_s=_FLUSH_S)
    stored = runner.mover.counters.stored[Tier.DISK]
    print(
        f"{args.path}: {len(prompts):,} prompts of {total:,} tokens, {computed:,} computed, "
        f"{stored:,} blocks and snapshots written"
    )
    if not whole:
        print(f"not everything could be stored: {runner.mover.counters.last_error}")
    command_line.write_json(
        args.json,
        {"prompts": len(prompts), "tokens": total, "computed": computed, "stored": stored},
    )
    return 0 if whole else 1


@contextlib.contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on standard error; what it gives takes (done, total)."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f} of {task.total:,.0f}"),
        TimeElapsedColumn(),
    )
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task(what, total=0)

    def advance(done: int, total: int) -> None:
        bar.start()  # only now, so that an error before is one line
        bar.update(task, completed=done, total=total)

    try:
        yield advance
    finally:
        if bar.live.is_started:
            bar.stop()


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _short(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:97]}..."


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "list": list_,
    "inspect": inspect,
    "verify": verify,
    "prune": prune_,
    "prewarm": prewarm,
}


def main() -> int:
    """Runs one command."""
    args = parse(sys.argv[1:])
    return COMMANDS[args.command](args)


if __name__ == "__main__":
    command_line.run(main)

"""Where the rollout of reuse stands, and the step that only a person takes.

  rollout.py show STATE.json
  rollout.py forward STATE.json --to shadow --by ada --reason "first look at production traffic"
  rollout.py forward STATE.json --to percent --percent 5 --by ada --reason "10,000 were equal"
  rollout.py back STATE.json --to off --by ada --reason "new weights tomorrow"
  rollout.py check --json FILE       plants faults in the toy model; exit status 1 if one is missed

Stages are off, shadow, percent and full; forward goes one at a time, back any number. A server that
reads the file sees a change within a second, and writes its own rollbacks there; see
docs/rollout.md.
"""

import argparse
import datetime
import pathlib
import sys
import time

import command_line
from rich.markup import escape

from hybridkv.errors import UserError
from hybridkv.observe import rollout
from hybridkv.observe.rollout import RolloutStage, RolloutState
from hybridkv.observe.rollout_file import RolloutFile


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise UserError(f"{message} (see {self.prog} --help)")


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line.

    Raises:
      UserError: it is not one.
    """
    parser = _Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, help_ in (
        ("show", "where it stands"),
        ("forward", "one stage on"),
        ("back", "any number of stages back"),
        ("check", "plants faults and has them rolled back"),
    ):
        command = commands.add_parser(name, help=help_)
        command.add_argument("--json", metavar="FILE", help="write the result here too")
        if name == "check":
            command.add_argument("--seed", type=int, default=0)
            continue
        command.add_argument("state", type=pathlib.Path, help="the state file")
        if name != "show":
            stages = [stage.value for stage in RolloutStage]
            command.add_argument("--to", required=True, choices=stages, help="the stage after")
            command.add_argument("--by", required=True, metavar="NAME", help="who decides")
            command.add_argument("--reason", required=True, metavar="TEXT", help="why")
            command.add_argument("--percent", type=float, help="that reuse serves, for percent")
    return parser.parse_args(argv)


def change(args: argparse.Namespace) -> RolloutState:
    """Goes forward or back.

    Raises:
      UserError: no such transition, or the file cannot be read or written.
    """
    step = {"forward": rollout.forward, "back": rollout.back}[args.command]
    return RolloutFile(args.state).change(
        lambda state: step(
            state,
            RolloutStage(args.to),
            by=args.by,
            reason=args.reason,
            now=time.time(),
            percent=args.percent,
        )
    )


def show(path: pathlib.Path) -> RolloutState:
    """Reads a state.

    Raises:
      UserError: there is none, or it cannot be read.
    """
    if not path.exists():
        raise UserError(f"there is no state at {path}: the first step forward makes one")
    return RolloutFile(path).read()


def report(state: RolloutState) -> None:
    """Prints a state and how it came to be."""
    print(f"stage {state.stage.value}, reuse serves {state.percent:g} % of requests")
    if state.rolled_back:
        print(f"rolled back, until a person goes forward: {state.reason}")
    rows = [
        (
            datetime.datetime.fromtimestamp(each.at, datetime.UTC).isoformat(" ", "seconds"),
            f"{each.before.value} -> {each.after.value}",
            f"{each.percent:g}",
            escape(each.by),
            each.cause.value if each.cause else "",
            escape(each.reason),
        )
        for each in state.history
    ]
    if rows:
        columns = ["when (UTC)", "stage", "percent", "by", "cause", "reason"]
        command_line.print_table("the last changes, the oldest first", columns, rows)


def check(args: argparse.Namespace) -> int:
    """Plants faults; 1 where one is missed or something else is found."""
    import dataclasses

    import verify_shadow  # compiles a model

    command_line.use_compilation_cache()
    rows = verify_shadow.check(seed=args.seed)
    ok = verify_shadow.report(rows)
    result = [{**dataclasses.asdict(row), "ok": row.ok} for row in rows]
    command_line.write_json(args.json, {"ok": ok, "rows": result})
    return 0 if ok else 1


def main() -> int:
    """Runs one command."""
    args = parse(sys.argv[1:])
    if args.command == "check":
        return check(args)
    state = show(args.state) if args.command == "show" else change(args)
    report(state)
    command_line.write_json(args.json, state.to_json())
    return 0


if __name__ == "__main__":
    command_line.run(main)

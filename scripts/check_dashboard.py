"""Asks a Prometheus what every panel of the dashboard would show.

    python scripts/check_dashboard.py --prometheus http://localhost:9090 --job hybridkv

An imported dashboard with empty panels may lack a scrape, a label or only traffic. Here each query
is sent as Grafana would send it: one that the server does not take is an error (exit status 1), one
without data is listed, because a metric of what is not configured has none (a store's, without
``--store``).
"""

import argparse
import collections
import dataclasses
import json
import pathlib
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

import command_line

from hybridkv.errors import UserError

DASHBOARD = pathlib.Path(__file__).parent.parent / "docs" / "dashboards" / "hybridkv.json"
_TIMEOUT_S = 30.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """What a Prometheus says to one query of a panel."""

    panel: str
    query: str
    series: int = 0
    error: str | None = None

    @property
    def outcome(self) -> str:
        """In one word."""
        return "refused" if self.error else ("data" if self.series else "no data")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prometheus", default="http://localhost:9090", metavar="URL")
    parser.add_argument("--job", default="hybridkv", help="the scrape's name, or a pattern")
    parser.add_argument("--interval", default="1m", help="what rates are taken over")
    parser.add_argument("--dashboard", type=pathlib.Path, default=DASHBOARD, metavar="FILE")
    parser.add_argument("--json", metavar="FILE", help="write the answers here too")
    return parser.parse_args(argv)


def queries(board: dict[str, Any], *, job: str, interval: str) -> list[tuple[str, str]]:
    """Titles of panels with their queries, the dashboard's variables filled in."""
    filled = {"$__rate_interval": interval, "$job": job}

    def fill(query: str) -> str:
        for name, value in filled.items():
            query = query.replace(name, value)
        return query

    return [
        (panel["title"], fill(target["expr"]))
        for panel in board["panels"]
        for target in panel.get("targets", ())
    ]


def ask(url: str, panel: str, query: str) -> Answer:
    """One query, now.

    Raises:
      UserError: there is no Prometheus at ``url``.
    """
    address = f"{url.rstrip('/')}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    try:
        with urllib.request.urlopen(address, timeout=_TIMEOUT_S) as reply:
            found = json.load(reply)["data"]["result"]
    except urllib.error.HTTPError as error:
        said = error.read().decode(errors="replace")
        return Answer(panel=panel, query=query, error=f"{error.code}: {said[:200]}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"no Prometheus answers at {url}: {error}") from None
    return Answer(panel=panel, query=query, series=len(found))


def read_board(path: pathlib.Path) -> dict[str, Any]:
    """A dashboard.

    Raises:
      UserError: it is none.
    """
    try:
        board = json.loads(path.read_text())
        board["panels"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is no dashboard: {error}") from None
    return dict(board)


def main() -> int:
    """Asks, prints, and gives 1 where a query was refused."""
    args = parse()
    if not args.prometheus.startswith(("http://", "https://")):
        raise UserError(f"--prometheus {args.prometheus!r} is no http:// or https:// address")
    board = read_board(args.dashboard)
    answers = [
        ask(args.prometheus, panel, query)
        for panel, query in queries(board, job=args.job, interval=args.interval)
    ]
    shown = [answer for answer in answers if answer.outcome != "data"]
    if shown:
        rows = [(answer.panel, answer.outcome, answer.error or answer.query) for answer in shown]
        command_line.print_table("without data", ("panel", "outcome", "query"), rows)
    counts = collections.Counter(answer.outcome for answer in answers)
    print(
        f"{len(answers)} queries: {counts['data']} with data, {counts['no data']} without,"
        f" {counts['refused']} refused"
    )
    command_line.write_json(args.json, [dataclasses.asdict(answer) for answer in answers])
    return 1 if counts["refused"] else 0


if __name__ == "__main__":
    command_line.run(main)

"""A peer in a process of its own, which takes and answers one JSON line each."""

import contextlib
import json
import pathlib
import subprocess
from typing import Any

from hybridkv.errors import UserError

PEERS = pathlib.Path(__file__).parent / "peers"


class PeerProcess:
    """Runs ``peers/<script>`` with ``python``; ``about`` is its answer to the first line."""

    def __init__(self, python: str, script: str, start: dict[str, Any], remedy: str) -> None:
        """``remedy`` says what to install when it can't run."""
        self.remedy = remedy
        try:
            self.process = subprocess.Popen(
                [python, "-W", "ignore", str(PEERS / script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        except OSError as error:
            raise UserError(f"cannot run {python}: {error.strerror}: {remedy}") from error
        try:
            self.about = self.ask(start)
        except UserError:
            self.close()
            raise

    def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        """Sends a line and waits for the answer.

        Raises:
          UserError: the peer ended or answered with an error.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # then it has said why, below
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        answer = json.loads(line) if line else {"error": f"it ended at {command.get('call')}"}
        if "error" in answer:
            raise UserError(f"the peer cannot run ({answer['error']}): {self.remedy}")
        return answer

    def close(self) -> None:
        """Ends the process."""
        self.process.kill()
        self.process.communicate()

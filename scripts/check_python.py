"""Exits with one clear line when this Python is too old. Runs on any Python 3."""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 (an older Python runs this very line)
    found = sys.version.split()[0]
    sys.exit(
        "hybridkv needs Python 3.11 or newer, not " + found + ": set PYTHON=/path/to/python3.11"
    )

"""Where things are in the repository."""

import pathlib

REPOSITORY = pathlib.Path(__file__).parent.parent

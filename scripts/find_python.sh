#!/bin/sh
# Prints the first Python >= 3.12 that runs: on the PATH, then among pyenv's versions.
# Exits with status 1 when there is none. Never installs one.
versions="${PYENV_ROOT:-$HOME/.pyenv}/versions"
for candidate in python3.12 python3.13 python3.14 python3 \
    "$versions"/3.12*/bin/python3 "$versions"/3.13*/bin/python3 "$versions"/3.14*/bin/python3; do
  if "$candidate" -c 'import sys, venv; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
    echo "$candidate"
    exit 0
  fi
done
echo "no Python >= 3.12 found" >&2
exit 1

#!/usr/bin/env bash
# Everything a change must pass, fastest first; CI runs this very file. With --no-tests: all but the test suite.
# Needs an environment with `pip install -e ".[dev]"`, active.
set -euo pipefail
cd "$(dirname "$0")/.."

tests=yes
case "${1-}" in
  "") ;;
  --no-tests) tests=no ;;
  *) echo "usage: scripts/check.sh [--no-tests]" >&2; exit 2 ;;
esac

echo "== ruff";         ruff check .
echo "== pyright";      pyright
echo "== architecture"; pytest -q -n 0 tests/test_architecture.py
if [ "$tests" = yes ]; then
  echo "== tests"; pytest
fi

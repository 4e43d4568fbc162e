#!/usr/bin/env bash
# Build sdist and wheel of HEAD into dist/, twice to see that the files are the same, and try each where nothing else is.
# Usage: tools/dist.sh PYTHON    a Python that has build and twine
set -euo pipefail
cd "$(git rev-parse --show-toplevel)"
python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
# builds of one commit give the same files
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH
rm -rf dist build/dist
mkdir -p build/dist

for copy in first second; do
  echo "==> building sdist and wheel, $copy time"
  mkdir "build/dist/$copy"
  git archive HEAD | tar -x -C "build/dist/$copy"
  (cd "build/dist/$copy" && "$python" -m build . >/dev/null)
done
diff -r build/dist/first/dist build/dist/second/dist
cp -r build/dist/first/dist dist
"$python" -m twine check --strict dist/*

try() {  # FILE EXTRA: install the file into an empty environment, and try it there
  echo "==> trying $1$2 in an empty environment"
  "build/dist/$3/bin/pip" install --quiet --disable-pip-version-check -c constraints.txt "$1$2"
  # -I: nothing but what that environment holds
  (cd build && "dist/$3/bin/python" -I ../tests/smoke.py "${@:4}")
}
for environment in wheel sdist; do
  "$python" -m venv "build/dist/$environment"
done
try dist/*.whl "" wheel --core
try dist/*.whl "[train]" wheel
try dist/*.tar.gz "[train]" sdist
"$python" -m pip hash dist/*

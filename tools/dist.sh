#!/usr/bin/env bash
# Build sdist and wheel of HEAD into dist/, twice to see that the files are the same, and try each in an environment
# without other packages than they need.
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

try() {  # REQUIREMENT [OPTION]: install it into the environment, and try it there
  echo "==> trying $1"
  # --no-compile: most modules are never imported
  build/dist/env/bin/pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt "$1"
  # -I: nothing but what that environment holds
  (cd build && dist/env/bin/python -I ../tests/smoke.py "${@:2}")
}
"$python" -m venv build/dist/env
try dist/*.whl --core
try "$(echo dist/*.whl)[train]"
# the sdist needs what the wheel needs, so it takes the wheel's place
diff <(tar -xzOf dist/*.tar.gz --wildcards '*/PKG-INFO') <("$python" -m zipfile -e dist/*.whl build/dist/wheel &&
  cat build/dist/wheel/*.dist-info/METADATA)
build/dist/env/bin/pip uninstall --quiet --yes sngm
try "$(echo dist/*.tar.gz)[train]"
"$python" -m pip hash dist/*

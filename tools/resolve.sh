#!/usr/bin/env bash
# Resolve the package with constraints.txt from PyPI alone, as wheels, for each platform and Python it is meant for.
# Usage: tools/resolve.sh UV
set -euo pipefail
cd "$(git rev-parse --show-toplevel)"
rm -rf build/resolved
mkdir -p build/resolved
status=0
for platform in x86_64-unknown-linux-gnu aarch64-unknown-linux-gnu aarch64-apple-darwin x86_64-pc-windows-msvc; do
  for version in 3.11 3.12 3.13 3.14; do
    # torch's wheels need macOS 14
    if env -i SSL_CERT_FILE="${SSL_CERT_FILE:-}" https_proxy="${https_proxy:-}" HOME="$PWD/build" PATH="$PATH" MACOSX_DEPLOYMENT_TARGET=14.0 "$1" pip compile --quiet \
      --system-certs --no-config --only-binary :all: --python-platform "$platform" --python-version "$version" \
      --constraints constraints.txt --extra dev --extra ray --extra slurm --extra wandb --extra mlflow pyproject.toml --output-file "build/resolved/$platform-$version.txt" >/dev/null; then
      echo "$platform, Python $version: resolved"
    else
      status=1
    fi
  done
done
exit $status

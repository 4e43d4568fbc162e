#!/usr/bin/env bash
# Set up a clone of HEAD as a new user would: an empty home, no pip settings, nothing else in the environment.
# Usage: tools/fresh.sh TARGET [PYTHON...]
#   Runs `make demo` and `make TARGET` in the clone with each PYTHON; without one, with the oldest and the newest here.
set -euo pipefail
target=$1
shift
root=$(git rev-parse --show-toplevel)
[[ $# -gt 0 ]] || mapfile -t found < <("$root/tools/pythons.sh" | sed -n '1p;$p' | uniq)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# What a network may need in order to be reached; where packages come from is left to pip's defaults.
network=()
for name in PIP_CERT SSL_CERT_FILE http_proxy https_proxy no_proxy; do
  [[ -z ${!name:-} ]] || network+=("$name=${!name}")
done

for python in "${@:-${found[@]}}"; do
  rm -rf "$work/home" "$work/sngm"
  mkdir "$work/home"
  git clone --quiet "$root" "$work/sngm"
  for goal in demo "$target"; do
    echo "==> make $goal in a fresh clone with $("$python" --version) and an empty environment"
    env -i HOME="$work/home" PATH=/usr/local/bin:/usr/bin:/bin LANG=C.UTF-8 PIP_CONFIG_FILE=/dev/null \
      "${network[@]}" make --no-print-directory -C "$work/sngm" "$goal" PYTHON="$python"
  done
done

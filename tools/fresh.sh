#!/usr/bin/env bash
# Set up a clone of HEAD as a new user would: an empty home, pip's default sources, nothing else in the environment.
# Usage: tools/fresh.sh TARGET [PYTHON...]
#   Runs `make demo` and `make TARGET` in the clone with each PYTHON; without one, with the oldest and the newest here.
#   With all but the first, the demo trains for one epoch and one seed.
set -euo pipefail
target=$1
shift
root=$(git rev-parse --show-toplevel)
if [[ $# -eq 0 ]]; then
  while read -r python; do set -- "$@" "$python"; done < <("$root/tools/pythons.sh" | sed -n '1p;$p' | uniq)
  [[ $# -gt 0 ]] || { echo "no Python 3.11 or newer with venv found" >&2; exit 1; }
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# What a network may need in order to be reached; where packages come from is left to pip's defaults.
network=()
for name in PIP_CERT SSL_CERT_FILE http_proxy https_proxy no_proxy; do
  [[ -z ${!name:-} ]] || network+=("$name=${!name}")
done

check() {  # PYTHON FOLDER [OPTIONS OF THE DEMO]
  mkdir "$2" "$2/home"
  git clone --quiet "$root" "$2/sngm"
  for goal in demo "$target"; do
    echo "==> make $goal in a fresh clone with $("$1" --version) and an empty environment"
    # PIP_NO_COMPILE saves a minute, as most modules are never imported
    env -i HOME="$2/home" PATH=/usr/local/bin:/usr/bin:/bin LANG=C.UTF-8 PIP_CONFIG_FILE=/dev/null PIP_NO_COMPILE=1 \
      ${network[@]+"${network[@]}"} make --no-print-directory -C "$2/sngm" "$goal" PYTHON="$1" COMPARE="${3:-}"
  done
}

# Set-up mostly waits for packages, so all go side by side; each one's output is shown when it ends.
running=() options=
for python in "$@"; do
  check "$python" "$work/${#running[@]}" "$options" >"$work/${#running[@]}.log" 2>&1 &
  running+=($!)
  options="--epochs 1 --seeds 1"
done
status=0
for i in "${!running[@]}"; do
  wait "${running[i]}" || status=1
  cat "$work/$i.log"
done
exit $status

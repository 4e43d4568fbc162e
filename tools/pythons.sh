#!/usr/bin/env bash
# Print the Pythons of this machine that sngm runs on, a path a line, oldest version first.
for python in $(type -ap python3 python3.{11,12,13,14}) /usr/bin/python3 "$HOME"/.pyenv/versions/*/bin/python3; do
  "$python" -c 'import sys, venv, ensurepip; v = sys.version_info[:3]; print(*v, sys.executable)' 2>/dev/null
done | awk '$1 == 3 && $2 >= 11' | sort -n -u -k2,2 -k3,3 | cut -d" " -f4-

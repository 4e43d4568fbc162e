"""Test sngm with the newest torch on each minor version of Python found here, and with the oldest torch it supports.

Each pair is an environment of its own with packages from PyPI. The table goes into docs/versions.md.
Usage: python tools/matrix.py
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "versions.md"
# with numpy 2.4, the interpreter of the Triton that torch 2.11 pins cannot run loops
OLDEST, NEWEST = ["torch==2.11.*", "numpy<2.4"], ["torch"]
# optimizers, their state and checkpoints, compilation, sharding, the trainer
TESTS = [
    "parity", "registry", "arguments", "state", "settings", "amp", "extrap", "rounding", "compile", "compiled_kernels",
    "torch_internals", "sharding", "step", "train", "resume", "distributed",
]  # fmt: skip
NEEDS = ["pytest", "pytest-xdist", "hypothesis", "tensorboard", "pillow", "triton; platform_system == 'Linux'"]


def pythons() -> list[str]:
    """The oldest Python of each minor version."""
    found = subprocess.run([ROOT / "tools/pythons.sh"], capture_output=True, text=True, check=True).stdout.splitlines()
    return list({ask(python, "sys.version_info[:2]"): python for python in reversed(found)}.values())[::-1]


def ask(python: str | Path, expression: str, imports: str = "sys") -> str:
    command = [python, "-c", f"import {imports}; print({expression})"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def run_tests(python: str, wanted: list[str]) -> list[str]:
    """Set up one environment and run the tests in it; return a row of the table."""
    folder = ROOT / "build" / "matrix"
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([python, "-m", "venv", folder / "env"], check=True)
    own = folder / "env" / "bin" / "python"
    pins = folder / "constraints.txt"  # but for torch, what it pins and what depends on it
    lines = (ROOT / "constraints.txt").read_text().splitlines(keepends=True)
    free = re.compile(r"(torch|triton|setuptools|numpy|scipy|scikit-learn)==")
    pins.write_text("".join(line for line in lines if not free.match(line)))
    # PyPI alone: settings that name other places would hide what users meet
    bare = {k: v for k, v in os.environ.items() if not re.match(r"PIP_(?!CERT)|UV_|PYTHON", k)}
    bare |= {"PIP_CONFIG_FILE": os.devnull}
    install = [own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", pins]
    subprocess.run([*install, *wanted, *NEEDS, "-e", f"{ROOT}[train]"], check=True, env=bare)
    report = folder / "report.xml"
    tests = [f"tests/test_{name}.py" for name in TESTS]
    # of the interpreter of Triton 3.6, with numpy 2.3
    ignored = ["-W", "ignore:Conversion of an array with ndim:DeprecationWarning"]
    options = [*ignored, "-q", "-m", "not slow", "-n", "auto", "--hypothesis-profile=ci", f"--junitxml={report}"]
    code = subprocess.run([own, "-m", "pytest", *options, *tests], cwd=ROOT, env=bare).returncode
    if code not in (0, 1):  # 1: tests failed
        sys.exit(f"pytest ended with {code}")
    suite = ET.parse(report).getroot()[0]
    total, failed, skipped = (
        int(suite.get("tests", 0)),
        int(suite.get("failures", 0)) + int(suite.get("errors", 0)),
        int(suite.get("skipped", 0)),
    )
    versions = [ask(own, "platform.python_version()", "platform"), ask(own, "torch.__version__", "torch")]
    return [*versions, ask(own, "numpy.__version__", "numpy"), *map(str, (total - failed - skipped, skipped, failed))]


def write(rows: list[list[str]]) -> None:
    commit = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout
    table = ["| Python | torch | numpy | passed | skipped | failed |", "|---|---|---|---|---|---|"]
    table += [f"| {' | '.join(row)} |" for row in rows]
    table += ["", f"`make matrix`, commit {commit.strip()}, {platform.system()} {platform.machine()}."]
    begin, end = "<!-- matrix: begin -->\n", "<!-- matrix: end -->"
    before, rest = PAGE.read_text().split(begin)
    PAGE.write_text(before + begin + "\n" + "\n".join(table) + "\n" + end + rest.split(end)[1])


def main() -> None:
    first, *others = pythons()
    rows = []
    for python, wanted in [(first, OLDEST), *((python, NEWEST) for python in (first, *others))]:
        print(f"==> {python} with {' '.join(wanted)}", flush=True)
        rows.append(run_tests(python, wanted))
        print(*rows[-1], flush=True)
        write(rows)
    sys.exit(any(row[-1] != "0" for row in rows))


if __name__ == "__main__":
    main()

"""The structure of the package: imports in one direction, and files of readable size."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import sngm

ROOT = Path(sngm.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))


def imported(path):
    """Return the modules and packages at the top of sngm that a file imports, inside functions too."""
    package = ("sngm", *path.relative_to(ROOT).parent.parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            inside = list(package[: len(package) + 1 - node.level]) if node.level else []
            of = inside + (node.module.split(".") if node.module else [])
            names = [[*of, alias.name] for alias in node.names]
        else:
            continue
        yield from (name[1] for name in names if name[0] == "sngm" and len(name) > 1)


def test_no_package_imports_one_that_imports_it():
    graph = {}
    for path in FILES:
        top = path.relative_to(ROOT).parts[0].removesuffix(".py")
        graph.setdefault(top, set()).update(set(imported(path)) - {top})
    assert graph["training"] >= {"tasks", "optim"}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


def test_no_file_is_longer_than_400_lines():
    long = {str(path): lines for path in FILES if (lines := len(path.read_text().splitlines())) > 400}
    assert not long

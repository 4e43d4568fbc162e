"""Code blocks in the documentation run, and its links are valid."""

import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from console import sngm
from runs import call_ranks

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
FRAMEWORKS = ("transformers", "lightning", "accelerate", "timm", "torchtitan")


def frameworks(code: str) -> list[str]:
    return [name for name in FRAMEWORKS if re.search(rf"^(import|from) {name}\b", code, re.MULTILINE)]


def tier(code: str) -> list[pytest.MarkDecorator]:
    """Return the marks of a code block: nightly with another library, slow if it compiles or compares many runs."""
    if frameworks(code):
        return [pytest.mark.nightly]
    return [pytest.mark.slow] if re.search(r"torch\.compile\(|sngm\.compare\(", code) else []


SNIPPETS = [
    pytest.param(code, id=f"{page.name}-{number}", marks=tier(code))
    for page in PAGES
    for number, code in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE))
]


def for_many_processes(code: str) -> bool:
    return "init_process_group" in code


@pytest.mark.filterwarnings("ignore:.torch.jit.script.*is deprecated:DeprecationWarning")  # from inductor's imports
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated:FutureWarning")  # torch's own, from Lightning
@pytest.mark.usefixtures("in_one_process")
@pytest.mark.parametrize("code", [s for s in SNIPPETS if not for_many_processes(s.values[0])])
def test_every_snippet_runs_as_printed(code, tmp_path, monkeypatch):
    if frameworks(code):
        monkeypatch.syspath_prepend(ROOT / "tests" / "integrations")
        import common  # noqa: F401  # so that torchvision can be imported
    for framework in frameworks(code):
        pytest.importorskip(framework)
    if "torch.compile(" in code and shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("torch.compile needs a C++ compiler")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    exec(compile(code, "snippet", "exec"), {"__name__": "__main__"})


def run_script(code: str, folder: str) -> None:
    """Run one process of a script in a folder."""
    os.chdir(folder)
    scope = {"__name__": "__main__"}
    exec(compile(code, "snippet", "exec"), scope)
    os._exit(0)  # see plain_ddp in test_distributed.py


@pytest.mark.slow
@pytest.mark.parametrize("code", [s for s in SNIPPETS if for_many_processes(s.values[0])])
def test_every_snippet_for_many_processes_runs_in_two(code, tmp_path):
    call_ranks(2, run_script, code, str(tmp_path))


def test_the_task_of_the_documentation_trains_and_compares(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "your-own-task.md").read_text()
    code = next(s for s in re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE) if "class MyTask" in s)
    (tmp_path / "my_task.py").write_text(code)

    monkeypatch.chdir(tmp_path)
    trained = sngm("train my_task.py:MyTask --epochs 1 --out run --json").json
    assert trained["status"] == "finished"
    assert 0 < trained["result"]["test_error"] < 0.15, "guessing the mean distance is off by 0.2"
    assert (tmp_path / "run" / "run.json").exists()
    assert "sngm at batch 512: lr 0.003, 0.01, 0.03, 0.1" in sngm("compare my_task.py:MyTask --dry-run").out


def anchors(page: Path) -> set[str]:
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page):
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link} does not exist"
        assert not anchor or anchor in anchors(target), f"{link}: no such heading"


def test_the_test_of_every_guarantee_exists():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    rows = re.search(r"^\| guarantee \| test \|\n\|---\|---\|\n((?:\|.*\n)+)", page, re.MULTILINE)[1].splitlines()
    for row in rows:
        named = re.findall(r"`(tests/\w+\.py)::(\w+)`", row)
        assert named, f"{row} names no test"
        for file, name in named:
            assert f"\ndef {name}(" in (ROOT / file).read_text(), f"{file} has no {name}"


def test_contributing_names_the_files_that_exist():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    layout = page.partition("## How the code is laid out")[2].partition("\n## ")[0]
    package, benchmarks = layout.split("`benchmarks` times", 1)
    package, optim = package.split("`src/sngm/optim` imports", 1)
    for text, folder in (
        (package, ROOT / "src" / "sngm"),
        (optim, ROOT / "src" / "sngm" / "optim"),
        (benchmarks, ROOT / "benchmarks"),
    ):
        cells = [row.split("|")[1:3] for row in text.splitlines() if row.startswith("| `")]
        firsts = {name.rstrip("/") for first, _ in cells for name in re.findall("`([^`]+)`", first)}
        rest = {name for _, second in cells for name in re.findall(r"`([\w/]+\.py)`", second)}
        missing = {name for name in firsts if not (folder / name).exists()}
        missing |= {name for name in rest if not [*folder.rglob(name)]}
        assert not missing, f"CONTRIBUTING.md names {sorted(missing)}, which {folder} does not have"
        there = {path.name for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
        unnamed = {name for name in there if not name.startswith("__")} - firsts
        assert not unnamed, f"CONTRIBUTING.md does not name {sorted(unnamed)} of {folder}"


def test_every_method_has_a_page_the_index_leads_to():
    index = (ROOT / "docs" / "index.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "index.md" or f"({page.name})" in index, f"docs/index.md does not mention {page.name}"


def test_the_site_leads_to_every_page():
    site = (ROOT / "mkdocs.yml").read_text()
    for page in (*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "notebooks").glob("*.py")):
        assert f": {page.relative_to(ROOT).as_posix()}\n" in site, f"mkdocs.yml does not mention {page.name}"

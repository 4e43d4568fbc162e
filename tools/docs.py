"""Copy the pages and all that they link to into build/pages, in their places; and a hook of mkdocs for docstrings."""

import re
import shutil
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "build" / "pages"
SUFFIXES = (".md", ".svg", ".py", ".json")


def main() -> None:
    shutil.rmtree(PAGES, ignore_errors=True)
    pages = [*ROOT.glob("*.md"), *(path for name in ("docs", "results") for path in (ROOT / name).rglob("*"))]
    wanted = {path for path in pages if path.suffix in SUFFIXES and path.is_file()}
    for page in [path for path in wanted if path.suffix == ".md"]:
        for link in re.findall(r"\]\(([^)#\s]+)[)#]", page.read_text("utf-8")):
            target = (page.parent / link).resolve()
            if "://" not in link and target.is_file() and ROOT in target.parents:
                wanted.add(target)
    for path in wanted:
        copy = PAGES / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)


def on_config(config: Any) -> None:
    """Show the version beside the name of the site."""
    version = re.search(r'__version__ = "(.*)"', (ROOT / "src" / "sngm" / "__init__.py").read_text())[1]
    config.site_name = f"sngm {version}"


def on_page_content(html: str, **_: object) -> str:
    """Show the roles of reStructuredText, which docstrings share with torch's, as code."""
    html = re.sub(r"<p>\.\. math::\s*(.*?)</p>", r"<pre><code>\1</code></pre>", html, flags=re.DOTALL)
    return re.sub(r":(?:attr|class|func|math|meth|mod):(?=<code)", "", html)


if __name__ == "__main__":
    main()

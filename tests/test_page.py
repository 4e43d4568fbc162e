"""The HTML report in a browser."""

import os
import re
import shutil

import pytest
from test_report import Folder, write_hostile
from waiting import PATIENCE

from sngm import report

COLOURS = {"light": ("#0063a6", "#c2410c"), "dark": ("#5cb8f0", "#fb923c")}
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def missing(what):
    if os.environ.get("SNGM_REQUIRE_BROWSER") == "1":
        pytest.fail(f"SNGM_REQUIRE_BROWSER=1, but {what}")
    pytest.skip(what)


@pytest.fixture(scope="module")
def browser():
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("playwright is not installed")
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        missing(f"none of {', '.join(BROWSERS)} is on the path")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-gpu"], timeout=PATIENCE * 1000
        )
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser):
    """Return a function that opens a file offline and collects the browser's errors."""
    contexts, complaints = [], []

    def visit(path, width=1280, scheme="light"):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
        contexts.append(context)
        context.set_default_timeout(PATIENCE * 1000)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("requestfailed", lambda request: complaints.append(request.url))
        page.on("dialog", lambda dialog: complaints.append(dialog.message))
        page.goto(path.as_uri())
        return page

    yield visit
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = Folder(tmp_path_factory.mktemp("study"))
    methods = ["msgd", "lars", "sngm(weight_decay=0.0008, scope=tensor)"]
    for i, method in enumerate(methods):
        for batch in (32, 256, 2048, 16384, 65536):
            for lr in (0.03, 0.1, 0.3):
                folder.run(
                    method, batch, 0.9 - lr / 10, lr=lr, part="select", status="diverged" if lr > 0.2 else "finished"
                )
            folder.runs(method, batch, [0.9 + 0.01 * i, 0.92 + 0.01 * i, 0.91])
    return report.write(folder.path)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    return write_hostile(tmp_path_factory.mktemp("hostile"))


@pytest.mark.parametrize(
    ("which", "width", "scheme"),
    [("study", 1280, "light"), ("study", 390, "dark"), ("hostile", 1280, "dark"), ("hostile", 390, "light")],
)
def test_the_page_fits_and_every_figure_is_drawn(open_page, request, which, width, scheme):
    page = open_page(request.getfixturevalue(which), width, scheme)
    for fold in page.query_selector_all("summary"):
        fold.click()
    assert page.evaluate("document.scrollingElement.scrollWidth <= innerWidth")
    sizes = page.evaluate("[...document.querySelectorAll('svg')].map(s => s.getBoundingClientRect().toJSON())")
    assert all(size["width"] > 0 and size["height"] > 0 for size in sizes)
    assert page.locator("svg.chart").count() == (11 if which == "study" else 5)
    assert page.evaluate("[...document.querySelectorAll('svg path')].every(p => p.getAttribute('d').length > 4)")
    assert page.evaluate("[...document.querySelectorAll('svg.chart')].every(s => s.querySelector('g > title'))")
    assert page.evaluate("[...document.querySelectorAll('svg.chart')].every(s => s.role == 'img' && s.ariaLabel)")
    links = set(page.evaluate("[...document.querySelectorAll('[href]')].map(u => u.getAttribute('href'))"))
    assert {re.match(r"#|runs/run\d+/$|data:text/csv|data:application/json", link)[0][:5] for link in links} == {
        "#", "runs/", "data:",
    }  # fmt: skip
    assert page.evaluate("[...document.querySelectorAll('th')].every(th => th.scope)")


OVERLAPS = """svg => {
    const boxes = [...svg.querySelectorAll('text')].map(t => [t.textContent, t.getBoundingClientRect()])
    return boxes.flatMap(([a, r], i) => boxes.slice(i + 1).filter(([b, s]) =>
        r.left < s.right - 1 && s.left < r.right - 1 && r.top < s.bottom - 2 && s.top < r.bottom - 2
    ).map(([b]) => a + ' / ' + b))
}"""
OUTSIDE = """svg => {
    const frame = svg.getBoundingClientRect()
    return [...svg.querySelectorAll('text, path')].filter(e => !e.closest('defs, [clip-path]')).filter(e => {
        const box = e.getBoundingClientRect()
        return box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 1 || box.bottom > frame.bottom + 1
    }).map(e => e.textContent || e.getAttribute('d'))
}"""  # noqa: E501


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_figures_pass_the_checklist(open_page, study, width, scheme):
    page = open_page(study, width, scheme)
    for chart in page.query_selector_all("svg.chart"):
        assert chart.evaluate(OVERLAPS) == []
        assert chart.evaluate(OUTSIDE) == []
    rates = page.locator("section", has=page.get_by_role("heading", name="Validation accuracy against learning rate"))
    ticks = rates.locator("svg.chart g[id^=xtick] text, svg.chart text").all_text_contents()
    powers = {tick for tick in ticks if re.fullmatch(r"(0\.)?0*10*", tick)}
    assert {"0.01", "0.1", "1"} <= powers
    assert not {"0.03", "0.3"} & set(ticks)
    scale = "Math.hypot(t.getScreenCTM().a, t.getScreenCTM().b)"  # some text is rotated
    size = f"t => {scale} * parseFloat(getComputedStyle(t).fontSize)"
    assert min(page.evaluate(f"[...document.querySelectorAll('svg.chart text')].map({size})")) >= 9, "pixels"


def test_a_table_is_saved_as_csv_and_json(open_page, study, tmp_path):
    page = open_page(study)
    for name in ("results.csv", "results.json"):
        with page.expect_download() as download:
            page.get_by_text(name, exact=True).click()
        download.value.save_as(tmp_path / name)
        assert "sngm(scope=tensor,weight_decay=0.0008)" in (tmp_path / name).read_text()
    assert (tmp_path / "results.csv").read_text() == study.with_name("results.csv").read_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_stand_out_from_the_paper(open_page, study, scheme):
    page = open_page(study, scheme=scheme)
    names = ["--paper", "--ink", "--soft", *(f"--s{i}" for i in range(7))]
    read = "names => names.map(n => getComputedStyle(document.documentElement).getPropertyValue(n))"
    paper, *others = page.evaluate(read, names)
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == f"rgb{rgb(paper)}"
    for name, colour in zip(names[1:], others, strict=True):
        assert contrast(colour, paper) >= 4.5, name


def rgb(colour):
    return tuple(int(colour.strip()[i : i + 2], 16) for i in (1, 3, 5))


def contrast(a, b):
    """Return the contrast by the formula of WCAG 2."""

    def luminance(colour):
        parts = [c / 3294.6 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in rgb(colour)]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    low, high = sorted([luminance(a), luminance(b)])
    return (high + 0.05) / (low + 0.05)


def test_hostile_labels_are_shown_as_text(open_page, hostile):
    page = open_page(hostile)
    assert page.locator("script").count() == 0
    for place in ("h1", "tbody th", ".legend", "dd code"):
        assert "<script>alert('x')</script>|&\"" in page.locator(place).first.text_content()


@pytest.mark.parametrize(("name", "scheme"), [("curves", "light"), ("batch", "dark"), ("lr", "light")])
def test_figures_alone_bring_their_own_paper_and_ink(open_page, study, name, scheme):
    page = open_page(study.with_name(f"{name}.svg"), scheme=scheme)
    fill = page.evaluate("getComputedStyle(document.querySelector('path')).fill")
    ink = page.evaluate("getComputedStyle(document.querySelector('text')).fill")
    assert (fill == "rgb(255, 255, 255)") == (scheme == "light")
    assert fill != ink
    strokes = page.evaluate("[...document.querySelectorAll('path')].map(p => getComputedStyle(p).stroke)")
    assert {f"rgb{rgb(colour)}" for colour in COLOURS[scheme]} & set(strokes)


def test_a_page_without_results_opens_too(open_page, tmp_path):
    page = open_page(report.write(Folder(tmp_path).study(["sngm"], [32]).path), 390)
    assert "No run has finished yet" in page.locator("h1").text_content()

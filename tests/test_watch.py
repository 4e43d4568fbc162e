"""The live report: what it serves, and what it refuses."""

import http.client
import json
import re
import threading
from contextlib import contextmanager

import pytest
from console import refused, sngm
from test_page import browser  # noqa: F401
from test_report import Folder

from sngm.report.live import serve


@pytest.fixture
def study(tmp_path):
    folder = Folder(tmp_path / "study")
    folder.runs("sngm", 32, [0.9, 0.91, 0.92])
    (tmp_path / "secret.txt").write_text("secret")
    (folder.path / "runs" / "out.txt").symlink_to(tmp_path / "secret.txt")
    (folder.path / "runs" / "up").symlink_to(tmp_path)
    (folder.path / "sub").mkdir()
    (folder.path / "sub" / "index.html").symlink_to(tmp_path / "secret.txt")
    (folder.path / "sub" / "checkpoint.pt").write_text("secret")
    (folder.path / "sub" / "link.txt").symlink_to(folder.path / "sub" / "checkpoint.pt")
    (folder.path / "sub" / ".hidden.txt").write_text("secret")
    (folder.path / "sub" / "a & b.txt").write_text("open")
    return folder


@pytest.fixture
def server(study):
    with serving(study.path) as found:
        yield found


@contextmanager
def serving(folder):
    found = serve(folder)
    thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield found
    found.shutdown()
    found.server_close()
    thread.join()


def ask(server, path="/", method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def test_the_page_follows_the_records(study, server):
    status, text = ask(server)
    assert status == 200
    assert "sngm reaches 91.0 %" in text
    assert 'http-equiv="refresh"' in text
    assert ask(server)[1] == text
    study.run("msgd", 32, None, status="failed", error="OSError: disk full")
    study.run("msgd", 32, 0.5, status="running", seed=1)
    text = ask(server, "/?again")[1]
    assert "OSError: disk full" in text
    assert "run004 at epoch 3 of 3" in text
    assert not (study.path / "report.html").exists(), "nothing is written"


def test_records_are_served_and_nothing_outside_the_folder(study, server):
    assert json.loads(ask(server, "/runs/run000/run.json")[1])["status"] == "finished"
    assert "run.json" in ask(server, "/runs/run000/")[1]
    for path in ("/sub/", "/sub/?a", "/sub/#a"):
        assert re.findall('href="(.*?)">(.*?)<', ask(server, path)[1]) == [("./a%20%26%20b.txt", "a &amp; b.txt")]
    assert ask(server, "/sub/a%20%26%20b.txt") == (200, "open")
    assert ask(server, "/sub")[0] == 301
    for path in (
        "/../secret.txt", "/%2e%2e/secret.txt", "/runs/out.txt", "/runs/up/secret.txt", "/runs/up/", "//secret.txt",
        "/runs/run000/../../../secret.txt", "/..%2fsecret.txt", "/..%5csecret.txt",
        "/sub/index.html", "/sub/checkpoint.pt", "/sub/link.txt", "/sub/.hidden.txt", "/a%00b",
    ):  # fmt: skip
        status, text = ask(server, path)
        assert status == 404, path
        assert "secret" not in text


def test_only_reading_requests_under_our_own_name_are_answered(study, server):
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert ask(server, "/runs/run000/run.json", method)[0] == 501
    assert (study.path / "runs" / "run000" / "run.json").exists()
    assert ask(server, "/", "HEAD") == (200, "")
    assert ask(server, "/", Host="evil.example")[0] == 403
    assert ask(server, "/", Host="localhost.evil.example:80")[0] == 403
    assert ask(server, "/", Host="localhost:1234")[0] == 200, "through a tunnel"
    assert server.server_address[0] == "127.0.0.1"


def test_a_folder_that_is_not_there_yet_is_waited_for(tmp_path):
    with serving(tmp_path / "later") as server:
        assert "No run has begun yet." in ask(server)[1]
        folder = Folder(tmp_path / "later")
        folder.run("sngm", 32, 0.9)
        folder.study(["sngm"], [32], planned=3)
        assert "1 of 3 runs have ended (1 finished)." in ask(server)[1]
        assert 'http-equiv="refresh"' in ask(server)[1]
        folder.run("sngm", 32, 0.9, seed=1)
        folder.run("sngm", 32, 0.9, seed=2)
        folder.study(["sngm"], [32], planned=3, ended=True)
        assert 'http-equiv="refresh"' not in ask(server)[1], "the study has ended"


def test_a_file_and_a_port_in_use_are_refused(tmp_path, study, server):
    refused(sngm(f"watch {tmp_path / 'secret.txt'}"), "is not a folder")
    refused(sngm(f"watch {study.path} --port {server.server_address[1]}"), "--port", "choose another one")


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
def test_the_live_page_changes_in_a_browser(browser, study, server, width):  # noqa: F811
    context = browser.new_context(viewport={"width": width, "height": 900})
    page = context.new_page()
    page.goto(f"http://127.0.0.1:{server.server_address[1]}/")
    assert page.locator(".bad").count() == 0
    study.run("msgd", 32, None, status="failed", error="OSError: disk full")
    page.locator(".bad").wait_for(timeout=30_000)  # loaded again by itself
    assert page.evaluate("document.scrollingElement.scrollWidth <= innerWidth")
    page.locator(".bad a").click()
    assert "run.json" in page.content()
    context.close()

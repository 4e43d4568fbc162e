"""Serve the report of a folder while its runs are training: on this machine only, and read-only."""

from __future__ import annotations

import contextlib
import io
import os
import re
import threading
from functools import partial
from html import escape
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ..errors import UsageError
from .html import render
from .page import html
from .records import clean
from .summary import summarise_tasks

ADDRESS = "127.0.0.1"
SERVED = (".json", ".jsonl", ".html", ".svg", ".csv", ".md", ".txt")  # suffixes of records and of report files
SHOWN = ("run.json", "metrics.jsonl", "study.json")  # files that make the page change


class Page:
    """The report page of a folder, rendered again when a record has changed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lock = folder, threading.Lock()
        self.seen: Any = None
        self.text = b""

    def read(self) -> bytes:
        """Return the page as HTML; if a record has changed since the last call, render it again first."""
        with self.lock:
            now = self._changes()
            if now != self.seen:
                self.text, self.seen = self._render(bool(now)).encode(), now
            return self.text

    def _render(self, begun: bool) -> str:
        subject, answer = str(self.folder), "No run has begun yet."
        try:
            if begun:
                return html(summarise_tasks(self.folder), live=True)
        except (FileNotFoundError, UsageError) as error:  # the folder holds no run, or none that can be read
            answer = str(error)
        return render("page", title=subject, subject=subject, answer=answer, live=True)

    def _changes(self) -> list[tuple[str, int, int]]:
        found = []
        for path in sorted(path for name in SHOWN for path in self.folder.rglob(name)):
            with contextlib.suppress(OSError):  # the file was deleted in the meantime
                about = path.stat()
                found.append((str(path), about.st_mtime_ns, about.st_size))
        return found


class Handler(SimpleHTTPRequestHandler):
    """Answer GET and HEAD for the page at /, records, report files and folder listings; all else is an error."""

    def __init__(self, *args: Any, page: Page, **settings: Any) -> None:
        self.page = page
        super().__init__(*args, directory=str(page.folder), **settings)

    def translate_path(self, path: str) -> str:
        """Return the path of a URL; if the file must not be served, return a path that does not exist."""
        found = super().translate_path(path)
        return found if self._served(found) else str(self.page.folder / "not-here" / "not-here")

    def send_head(self) -> Any:
        """Send the headers of the page, a file or a listing, and return the content.

        A folder gives a listing even if it holds an index.html. A request whose Host header is not this machine gets
        an error, as protection against DNS rebinding.
        """
        if self.headers.get("Host", "").partition(":")[0] not in (ADDRESS, "localhost"):  # a tunnel may change the port
            self.send_error(HTTPStatus.FORBIDDEN, "open it as http://127.0.0.1")
            return None
        path = re.split("[?#]", self.path)[0]
        if path in ("/", "/report.html"):
            return self._send_html(self.page.read())
        found = Path(self.translate_path(self.path))
        return self.list_directory(found) if found.is_dir() and path.endswith("/") else super().send_head()

    def list_directory(self, path: Any) -> io.BytesIO:
        """Send the headers of a listing of the files that are served, and return its HTML."""
        names = sorted(p.name + "/" * p.is_dir() for p in Path(path).iterdir() if self._served(str(p)))
        links = "".join(f'<li><a href="./{quote(os.fsencode(name))}">{_shown(name)}</a>' for name in names)
        text = f'<!doctype html><meta charset="utf-8"><title>{_shown(Path(path).name)}</title><ul>{links}</ul>'.encode()
        return self._send_html(text)

    def _served(self, path: str) -> bool:
        """Return whether a path is a folder, a record or a report's file, within the page's folder and not hidden."""
        if "\0" in path:
            return False
        found = Path(os.path.realpath(path))  # follows symbolic links; a loop of links does not raise an error
        if not found.is_relative_to(self.page.folder):
            return False
        hidden = any(part.startswith(".") for part in found.relative_to(self.page.folder).parts)
        return not hidden and (found.is_dir() or found.suffix in SERVED)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing for a request."""

    def _send_html(self, text: bytes) -> io.BytesIO:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        return io.BytesIO(text)


def _shown(name: str) -> str:
    return escape(clean(name))


def serve(folder: Path, port: int = 0) -> ThreadingHTTPServer:
    """Return a server of the live report of a folder, on 127.0.0.1; call its serve_forever().

    Args:
        folder: the folder of a study or of runs; it may be empty, or created later.
        port: the port, or 0 for any free port; ``server.server_address[1]`` is the port in use.
    """
    page = Page(Path(folder).resolve())
    page.read()
    return ThreadingHTTPServer((ADDRESS, port), partial(Handler, page=page))

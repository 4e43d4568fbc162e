"""The command `sngm watch`: the report of a study in the browser, while it runs."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = ("sngm watch runs/compare-digits-1a2b3c4d", "sngm watch runs/compare-digits-1a2b3c4d --port 8000")


def watch(
    folder: Annotated[Path, typer.Argument(help="The folder of a study, of several runs or of one.")],
    *,
    port: Annotated[
        int, typer.Option(help="Port on 127.0.0.1. Default: a free one.", min=0, max=65535, show_default=False)
    ] = 0,
) -> None:
    """Show the report of a folder in the browser while its runs are training: progress, curves as they come, failures
    at the top. Serves http://127.0.0.1 only, which no other machine can reach, and writes nothing. Ctrl-C ends it.
    """
    from ..errors import UsageError
    from ..report.live import serve

    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is not a folder")
    try:
        server = serve(folder, port)
    except PermissionError as error:
        raise UsageError(f"--port {port}: {error.strerror}; take one above 1023") from None
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise UsageError(f"--port {port}: {error.strerror}; choose another one") from None
    waits = "" if folder.is_dir() else ", which is not there yet"
    print(f"http://127.0.0.1:{server.server_address[1]}/ shows {folder}{waits}; Ctrl-C ends it", flush=True)
    with server, contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()

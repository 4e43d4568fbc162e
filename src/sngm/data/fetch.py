"""Download official archives: resume after an interruption, verify, and unpack completely or not at all."""

from __future__ import annotations

import gzip
import hashlib
import http.client
import os
import re
import shutil
import sys
import tarfile
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from .. import __version__
from ..errors import Failed, UsageError
from ..files import locked

CHUNK = 1 << 16  # bytes per read: small enough for steady progress on a slow connection
TIMEOUT = 30.0  # seconds to wait for a byte
TRIES = 3  # the most tries per mirror since the last byte received
BACKOFF = 1.0  # seconds before the second try; doubled before each further try
PATH_CONFLICTS = (FileExistsError, IsADirectoryError, NotADirectoryError)  # a member is both a file and a folder
MAX_DEPTH, MAX_NAME = 32, 200  # the most folders in a path of an archive, and the most characters of a name

Show = Callable[[int, int], None]  # gets the number done so far and the total
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Archive:
    """A published file with its MD5 checksum and size in bytes, and the folder and files that it holds."""

    name: str
    md5: str
    size: int
    folder: str
    files: tuple[str, ...]
    base: str = "https://www.cs.toronto.edu/~kriz/"

    def urls(self) -> list[str]:
        """Return the URLs to try: first the mirrors in SNGM_MIRRORS (base URLs or folders), then the official one."""
        bases = [*os.environ.get("SNGM_MIRRORS", "").split(), self.base]
        bases = [Path(base).resolve().as_uri() if os.path.isdir(base) else base for base in bases]
        return [f"{base.rstrip('/')}/{self.name}" for base in bases]


def tell(text: str) -> None:
    """Print a message on stderr, so that stdout stays machine-readable."""
    print(f"sngm: {text}", file=sys.stderr, flush=True)


def get(archive: Archive, root: Path, show: Show = lambda done, total: None, say: Say = tell) -> Path:
    """Return the archive's folder in `root`; if there is none, download and unpack the archive first.

    While another process downloads the archive, this function waits. An archive file that is already in `root` is
    unpacked, and not deleted. An incomplete folder is an error: the user has to delete it.

    Args:
        show: called with the bytes received so far and the total, for each chunk.
        say: called with messages for the user.
    """
    folder = root / archive.folder

    def complete() -> bool:
        return all((folder / name).is_file() for name in archive.files)

    if complete():
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise UsageError(f"{root} is not a folder; name another with `data_dir`") from None
    with locked(root, f".{archive.name}.lock", waiting=lambda: say(f"another process is fetching {archive.name}")):
        if complete():
            return folder
        if folder.exists():
            raise UsageError(f"{folder} is incomplete; delete it or move it away, then run the same command")
        file = root / archive.name
        brought = file.exists()
        if not brought:
            download(archive, file, show, say)
        elif (found := digest(file, "md5")) != archive.md5:
            raise Failed(f"{file} has the MD5 {found}, not {archive.md5}; delete it, then run the same command")
        unpack(file, archive.folder, root, archive.files)
        if not brought:
            file.unlink()
    return folder


def digest(path: Path, algorithm: str) -> str:
    """Return the checksum of a file, by an algorithm of hashlib."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()


# ---------------------------------------------------------------- from the network to a file


class _Lost(Exception):
    """The connection broke or the server had a temporary error; the caller tries again."""


class _Refused(Exception):
    """The mirror does not have the file; the caller tries the next mirror."""


def download(archive: Archive, to: Path, show: Show = lambda done, total: None, say: Say = tell) -> None:
    """Download an archive from the first of its URLs that has it with the right checksum.

    Received bytes stay in a .part file beside `to`, and the next call continues this file. If a continued file has a
    wrong checksum, its first part may be from another version, so the whole file is downloaded again.
    """
    part = to.with_name(f"{to.name}.part")
    why: list[str] = []
    for url in archive.urls():
        resumed = part.exists()
        try:
            for _ in range(1 + resumed):
                _fetch(url, part, archive.size, show, say)
                if (found := digest(part, "md5")) == archive.md5:
                    os.replace(part, to)
                    return
                part.unlink()
            why.append(f"{url}: the file it sends has the MD5 {found}, not {archive.md5}")
        except (_Lost, _Refused) as error:
            why.append(f"{url}: {error}")
    raise Failed(
        f"could not fetch {to.name} ({'; '.join(why)}); check the network, name a base URL that has it in "
        f"SNGM_MIRRORS, or put {to.name} into {to.parent} and run the same command"
    )


def _fetch(url: str, part: Path, size: int, show: Show, say: Say) -> None:
    """Complete a partial download. A failed try that received new bytes starts the count of tries again."""
    if _size(part) > size:  # it must be a part of another file
        part.unlink()
    tries, most = 0, _size(part)
    while _size(part) < size:
        try:
            _request(url, part, size, show)
        except _Lost as error:
            tries = tries + 1 if _size(part) <= most else 1
            most = max(most, _size(part))
            if tries >= TRIES:
                raise
            pause = BACKOFF * 2 ** (tries - 1)
            say(f"{url}: {error}; trying again in {pause:g} s")
            time.sleep(pause)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _request(url: str, part: Path, size: int, show: Show) -> None:
    """Request the missing bytes once and append them to `part`; overwrite `part` if the server sends the whole file."""
    done = _size(part)
    headers = {"User-Agent": f"sngm/{__version__}", "Accept-Encoding": "identity"}
    if done:
        headers["Range"] = f"bytes={done}-"
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        kind = _Lost if error.code >= 500 or error.code in (408, 425, 429) else _Refused
        raise kind(f"HTTP {error.code} {error.reason}") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        # a malformed or unsupported URL, or a file: URL without a file
        permanent = isinstance(reason, (str, ValueError, http.client.InvalidURL, FileNotFoundError))
        raise (_Refused if permanent else _Lost)(_reason(reason)) from None
    with response:
        span = response.headers.get("Content-Range", "")
        length = response.headers.get("Content-Length")
        if response.status == 206 and not re.fullmatch(rf"bytes {done}-\d+/{size}", span):
            raise _Refused(f"it sends {span or 'no Content-Range'}, not bytes {done}- of {size}")
        # Check before overwriting: the response may be the sign-in page of a network. A file: URL has the status None.
        if response.status != 206 and (response.status not in (None, 200) or length != str(size)):
            raise _Refused(f"HTTP {response.status} with {length or 'an unknown number of'} bytes, not {size}")
        done = done if response.status == 206 else 0
        with open(part, "ab" if done else "wb") as file:
            show(done, size)
            while done < size and (chunk := _read(response)[: size - done]):
                file.write(chunk)
                done += len(chunk)
                show(done, size)
    if done < size:
        raise _Lost(f"the connection ended at {done:,} of {size:,} bytes")


def _read(response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read(CHUNK)
    except (OSError, http.client.HTTPException) as error:
        raise _Lost(_reason(error)) from None


def _reason(error: object) -> str:
    return str(error) or type(error).__name__


# ---------------------------------------------------------------- from an archive to a folder


def unpack(archive: Path, folder: str, root: Path, files: Iterable[str] = ()) -> Path:
    """Unpack the archive's `folder` into `root`; the folder appears there only when it is complete."""
    aside = root / f".{archive.name}.unpacked"
    shutil.rmtree(aside, ignore_errors=True)  # left by a process that was killed
    aside.mkdir()
    try:
        try:
            with tarfile.open(archive) as tar:
                _extract(tar, aside)
        except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, *PATH_CONFLICTS) as error:
            raise Failed(f"{archive} cannot be unpacked: {error}") from error
        absent = [name for name in files if not (aside / folder / name).is_file()]
        if absent or not (aside / folder).is_dir():
            raise Failed(f"{archive} does not hold {', '.join(f'{folder}/{name}' for name in absent) or folder}")
        os.replace(aside / folder, root / folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return root / folder


def _extract(tar: tarfile.TarFile, root: Path) -> None:
    """Extract files and folders below `root`, by rules that are the same for every version of Python.

    tarfile's own filters need Python 3.11.4. Links and devices are errors, and owners and modes are ignored, because
    datasets need none of these.

    Raises:
        tarfile.TarError: a member's path is absolute, leaves `root` or is too deep or too long, or the member is
            neither a file nor a folder.
    """
    for member in tar:
        path = PurePosixPath(member.name)
        parts = path.parts
        # on Windows a drive letter or a backslash would leave `root` too
        outside = path.is_absolute() or ".." in parts or set("\\:") & set(member.name)
        if outside or len(parts) > MAX_DEPTH or max(map(len, parts), default=0) > MAX_NAME:
            raise tarfile.TarError(f"its path {member.name[:100]!r} is not allowed")
        if not (member.isreg() or member.isdir()):
            raise tarfile.TarError(f"{member.name[:100]!r} is neither a file nor a folder")
        target = root.joinpath(*parts)
        (target if member.isdir() else target.parent).mkdir(parents=True, exist_ok=True)
        if source := tar.extractfile(member):  # None for a folder
            with source, open(target, "wb") as file:
                shutil.copyfileobj(source, file)

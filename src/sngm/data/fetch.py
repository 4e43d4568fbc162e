"""Official archives from the network: resumed where they stopped, checked, and unpacked whole or not at all."""

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
from urllib.parse import urlsplit

from .. import __version__
from ..errors import Failed, UsageError
from ..files import locked

CHUNK = 1 << 16  # bytes a read: small enough that progress shows on a slow line
TIMEOUT = 30.0  # seconds without a byte
TRIES = 3  # of a mirror, without a byte gained
MOST_LEVELS, LONGEST = 32, 200  # folders of a path in an archive; letters of each
ODD_PATHS = (FileExistsError, IsADirectoryError, NotADirectoryError)  # a file in place of a folder
BACKOFF = 1.0  # seconds before the second try, doubled for each after it

Show = Callable[[int, int], None]  # how many so far, and of how many
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Archive:
    """A published file, with the checksum published beside it and its length in bytes."""

    name: str
    md5: str
    size: int
    folder: str
    files: tuple[str, ...]
    base: str = "https://www.cs.toronto.edu/~kriz/"

    def urls(self) -> list[str]:
        """Where it may be had, the user's own mirrors first."""
        bases = [*os.environ.get("SNGM_MIRRORS", "").split(), self.base]
        return [f"{_base_url(base).rstrip('/')}/{self.name}" for base in bases]


def _base_url(text: str) -> str:
    """Return the URL of a mirror: a folder's as file:, others as they are, if they can be asked."""
    try:
        if Path(text).is_dir():
            return Path(text).resolve().as_uri()
        url = urlsplit(text)
        _ = url.port  # which raises ValueError where it is no port
        host = (url.hostname or "").encode("idna")  # UnicodeError for an empty or too long part
        if url.scheme == "file" or (url.scheme in ("http", "https") and host and text.isascii() and text.isprintable()):
            return text
    except (ValueError, OSError):  # OSError: a name too long for a folder
        pass
    raise UsageError(
        f"SNGM_MIRRORS must hold base URLs, as https://example.org/data/, or folders, got {text[:80]!r}; "
        "mend or unset it"
    )


def archive_of(dataset: str, form: str) -> Archive:
    """The archive of a dataset in one of its forms."""
    from .cifar import LAYOUTS  # torch, which a command's help does not wait for

    names = {
        ("cifar10", "binary"): ("cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530", 170_052_171),
        ("cifar10", "python"): ("cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a", 170_498_071),
        ("cifar100", "binary"): ("cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8", 168_513_733),
        ("cifar100", "python"): ("cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85", 169_001_437),
    }
    if (dataset, form) not in names:
        known = " and ".join(sorted({name for name, _ in names}))
        raise UsageError(
            f"there is no {dataset!r} in the form {form!r} to get; there are {known}, as binary or python. "
            "sngm data says where others come from"
        )
    layout = next(one for one in LAYOUTS if f"cifar{one.classes}" == dataset and one.form == form)
    return Archive(*names[dataset, form], layout.folder, layout.files)


def tell(text: str) -> None:
    """For people: on stderr, where it spoils no data."""
    print(f"sngm: {text}", file=sys.stderr, flush=True)


def get(archive: Archive, root: Path, show: Show = lambda done, total: None, say: Say = tell) -> Path:
    """The archive's folder in `root`, fetched if it is not there. Of two processes one waits for the other.

    An archive that already lies in `root` is used, and kept. A folder that is there but not whole is the user's to
    delete. `show` is told of each piece that comes, `say` what people should know meanwhile.
    """
    folder = root / archive.folder
    if _whole(folder, archive.files):
        return folder
    urls = archive.urls()
    try:
        root.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise UsageError(f"{root} is no folder; name another with --data-dir") from None
    with locked(root, f".{archive.name}.lock", waiting=lambda: say(f"another process is fetching {archive.name}")):
        if _whole(folder, archive.files):
            return folder
        if folder.exists():
            raise UsageError(f"{folder} is there, but not whole; delete it or move it away, and it is fetched anew")
        file = root / archive.name
        brought = file.exists()
        if brought:
            if (found := digest(file, "md5")) != archive.md5:
                raise Failed(f"{file} has the MD5 {found}, not {archive.md5}; delete it, and it is fetched anew")
        else:
            download(urls, file, md5=archive.md5, size=archive.size, show=show, say=say)
        unpack(file, archive.folder, root, archive.files)
        if not brought:
            file.unlink()
    return folder


def _whole(folder: Path, files: Iterable[str]) -> bool:
    return all((folder / name).is_file() for name in files)


def digest(path: Path, algorithm: str) -> str:
    """A file's checksum, by the name it has in hashlib."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()


# ---------------------------------------------------------------- from the network to a file


class _Lost(Exception):
    """A connection that broke, or a server that cannot just now: worth another try."""


class _Refused(Exception):
    """A mirror that does not have it: the next one, then."""


def download(
    urls: list[str], to: Path, *, md5: str, size: int, show: Show = lambda done, total: None, say: Say = tell
) -> None:
    """Fetch a file from the first of these that gives the right one.

    What has come stays in a .part file beside `to`, whatever happens, and the next call goes on from there. There is
    no need to know which version of a file a part is of: a whole that has not the right sum is fetched from its
    beginning once. No reply makes a part shorter.
    """
    part = to.with_name(f"{to.name}.part")
    why: list[str] = []
    for url in urls:
        resumed = part.exists()
        try:
            _fetch(url, part, size, show, say)
            found = digest(part, "md5")
            if found != md5 and resumed:
                part.unlink()
                _fetch(url, part, size, show, say)
                found = digest(part, "md5")
            if found == md5:
                os.replace(part, to)
                return
            part.unlink()
            why.append(f"{url}: what it sends has the MD5 {found}, not {md5}")
        except (_Lost, _Refused) as error:
            why.append(f"{url}: {error}")
    raise Failed(
        f"could not fetch {to.name} ({'; '.join(why)}); check the network, name a base URL that has it in "
        f"SNGM_MIRRORS, or put {to.name} into {to.parent} and run the same command"
    )


def _fetch(url: str, part: Path, size: int, show: Show, say: Say) -> None:
    """Bring a part to its whole length, with as many tries as that takes while each gains something."""
    if _size(part) > size:  # of something else
        part.unlink()
    tries, most = 0, _size(part)
    while _size(part) < size:
        try:
            _request(url, part, size, show, have=_size(part))
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


def _request(url: str, part: Path, size: int, show: Show, have: int) -> None:
    """Ask once for what comes after the first `have` bytes; a server that will not go on from there sends all."""
    headers = {"User-Agent": f"sngm/{__version__}", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416 and have:  # it has no more than that
            of = re.fullmatch(r"bytes \*/(\d+)", error.headers.get("Content-Range", ""))
            _right(int(of[1]) if of else None, size)
            return _request(url, part, size, show, have=0)
        kind = _Lost if error.code >= 500 or error.code in (408, 425, 429) else _Refused
        raise kind(f"HTTP {error.code} {error.reason}") from None
    except urllib.error.URLError as error:
        kind = _Refused if isinstance(error.reason, FileNotFoundError) else _Lost  # of a file: URL
        raise kind(str(error.reason)) from None
    except (OSError, http.client.HTTPException) as error:
        raise _Lost(_reason(error)) from None
    except ValueError as error:  # of a URL, this one or one that it redirects to
        raise _Refused(_reason(error)) from None
    with response:
        if response.status == 206:
            span = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", ""))
            if not span or int(span[1]) != have:  # other bytes than those asked for
                if not have:
                    raise _Refused("HTTP 206, for no range that was asked for")
                return _request(url, part, size, show, have=0)
            _right(int(span[2]) if span[2] != "*" else None, size)
            return _receive(response, part, have, size, show)
        if response.status not in (None, 200):  # None: of a file: URL
            raise _Refused(f"HTTP {response.status}")
        length = response.headers.get("Content-Length", "")
        _right(int(length) if length.isdigit() else None, size)
        _receive(response, part, 0, size, show)


def _right(length: int | None, size: int) -> None:
    """Refuse another file, such as a network's page to sign in at, before it takes the place of anything."""
    if length not in (None, size):
        raise _Refused(f"what it sends has {length:,} bytes, not {size:,}")


def _receive(response: http.client.HTTPResponse, part: Path, done: int, size: int, show: Show) -> None:
    """Append to a part; or, from the beginning, write beside it until there is more than it holds."""
    new, have, aside = part.with_name(f"{part.name}.new"), _size(part), not done
    try:
        with open(new if aside else part, "wb" if aside else "ab") as file:
            show(done, size)
            while done < size and (chunk := _read(response)[: size - done]):
                file.write(chunk)
                done += len(chunk)
                if aside and done > have:
                    os.replace(new, part)  # which goes on growing
                    aside = False
                show(done, size)
    finally:
        new.unlink(missing_ok=True)
    if done < size:
        raise _Lost(f"the connection ended at {done:,} of {size:,} bytes")


def _read(response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read(CHUNK)
    except (OSError, http.client.HTTPException) as error:
        raise _Lost(_reason(error)) from None


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


# ---------------------------------------------------------------- from an archive to a folder


def unpack(archive: Path, folder: str, root: Path, files: Iterable[str] = ()) -> Path:
    """Put the archive's `folder` into `root`, where it appears only once it is whole."""
    aside = root / f".{archive.name}.unpacked"
    shutil.rmtree(aside, ignore_errors=True)  # of a process that was killed
    aside.mkdir()
    try:
        try:
            with tarfile.open(archive) as tar:
                _extract(tar, aside)
        except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, *ODD_PATHS) as error:
            raise Failed(f"{archive} cannot be unpacked: {error}") from error
        absent = [name for name in files if not (aside / folder / name).is_file()]
        if absent or not (aside / folder).is_dir():
            raise Failed(f"{archive} does not hold {', '.join(f'{folder}/{name}' for name in absent) or folder}")
        os.replace(aside / folder, root / folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return root / folder


def _extract(tar: tarfile.TarFile, root: Path) -> None:
    """Extract files and folders below `root`, by rules that are the same on every Python.

    tarfile's own filters came with Python 3.11.4. Datasets need neither links nor devices, nor owners nor modes.

    Raises:
        tarfile.TarError: the path of a member is absolute, leaves `root` or is absurdly deep, or the member is neither
            a file nor a folder.
    """
    for member in tar:
        parts = PurePosixPath(member.name).parts
        # a Windows path has a drive or backslashes, which would count there
        if (
            {"/", ".."} & set(parts)
            or set("\\:") & set(member.name)
            or len(parts) > MOST_LEVELS
            or max(map(len, parts), default=0) > LONGEST
        ):
            raise tarfile.TarError(f"its path {member.name[:100]!r} is not allowed")
        if not (member.isreg() or member.isdir()):
            raise tarfile.TarError(f"{member.name[:100]!r} is neither a file nor a folder")
        target = root.joinpath(*parts)
        if member.isdir():
            target.mkdir(parents=True, exist_ok=True)
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        source = tar.extractfile(member)
        assert source is not None  # for a regular file it never is
        with source, open(target, "wb") as file:
            shutil.copyfileobj(source, file)

"""Faults that a process injects into its own file operations."""

import builtins
import errno
import io
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Fault:
    """What goes wrong: SIGKILL at a file operation, a full disk after some bytes, a read-only one after operations."""

    kill_at: int | None = None
    when: str = "before"  # or "after" the operation; of a write, "half" of it
    bytes_left: int | None = None
    read_only_after: int | None = None


class Operations:
    """Count and log the write operations below a folder, and inject a fault into them."""

    def __init__(self, folder: Path, fault: Fault, log: int) -> None:
        self.folder, self.fault, self.log = str(folder), fault, log
        self.count, self.bytes = 0, 0

    def install(self) -> None:
        opened, low_level = builtins.open, os.open
        builtins.open = io.open = lambda file, mode="r", *a, **k: self._open(opened, file, mode, *a, **k)
        os.open = lambda path, flags, *a, **k: (
            self.do("open", path, lambda: low_level(path, flags, *a, **k))
            if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            else low_level(path, flags, *a, **k)
        )
        replace, unlink, mkdir, fsync = os.replace, os.unlink, os.mkdir, os.fsync
        os.replace = lambda old, new, **k: self.do("replace", new, lambda: replace(old, new, **k))
        os.unlink = lambda path, **k: self.do("unlink", path, lambda: unlink(path, **k))
        os.mkdir = lambda path, *a, **k: self.do("mkdir", path, lambda: mkdir(path, *a, **k))
        os.fsync = lambda number: self.do("fsync", self.folder, lambda: fsync(number))

    def _open(self, opened: Any, file: Any, mode: str, *rest: Any, **more: Any) -> Any:
        if not set(mode) & set("wax+") or not self._inside(file):
            return opened(file, mode, *rest, **more)
        return Written(self, self.do("open", file, lambda: opened(file, mode, *rest, **more)), file)

    def _inside(self, path: Any) -> bool:
        return not isinstance(path, int) and os.path.abspath(os.fsdecode(path)).startswith(self.folder)

    def do(self, name: str, path: Any, act: Any, half: Any = None) -> Any:
        """Carry out one operation, or the fault that falls on it."""
        if not self._inside(path):
            return act()
        self.count += 1
        os.write(self.log, os.fsencode(f"{name} {os.path.abspath(os.fsdecode(path))}\n"))
        if self.fault.read_only_after is not None and self.count > self.fault.read_only_after and name != "fsync":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), os.fsdecode(path))
        mine = self.count == self.fault.kill_at
        if mine and self.fault.when != "after":
            if half is not None and self.fault.when == "half":
                half()
            os.kill(os.getpid(), signal.SIGKILL)
        result = act()
        if mine:
            os.kill(os.getpid(), signal.SIGKILL)
        return result


class Written:
    """A file that is open for writing on a disk with faults."""

    def __init__(self, operations: Operations, file: Any, path: Any) -> None:
        self.operations, self.file, self.path = operations, file, path

    def write(self, content: Any) -> int:
        left = self.operations.fault.bytes_left

        def put(count: int) -> None:
            self.file.write(content[:count])
            self.file.flush()

        def whole() -> int:
            fits = len(content) if left is None else max(0, left - self.operations.bytes)
            self.operations.bytes += len(content)
            os.write(self.operations.log, f"bytes {len(content)}\n".encode())
            put(fits)
            if fits < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fsdecode(self.path))
            return len(content)

        return self.operations.do("write", self.path, whole, half=lambda: put(len(content) // 2))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> "Written":
        return self

    def __exit__(self, *_: Any) -> None:
        self.file.close()

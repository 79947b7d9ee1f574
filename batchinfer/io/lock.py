"""One job per output: a lock that the system frees when its process dies."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from batchinfer.errors import OutputConflict, OutputError


class OutputLock:
    """Holds `OUTPUT.lock` until closed."""

    def __init__(self, path: Path, output: str) -> None:
        self._path = path
        while True:
            try:
                self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except OSError as error:
                raise OutputError(
                    f"{output}: the folder {path.parent} cannot be written ({error.strerror}); give another place with -o"
                ) from None
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(self._fd, 32, 0).decode("ascii", "replace").strip()
                os.close(self._fd)
                raise OutputConflict(
                    f"{output}: another job is writing it (process {holder or 'unknown'}); wait for it or stop it"
                ) from None
            except OSError:  # a file system without locks: go on unguarded rather than not at all
                return
            if self._is_current():
                break
            os.close(self._fd)  # the holder before us removed the file between our open and our lock
        try:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)
        except OSError:  # a full disk: the lock holds all the same, only without our number
            return

    def _is_current(self) -> bool:
        try:
            return os.fstat(self._fd).st_ino == self._path.stat().st_ino
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Free the output for others."""
        self._path.unlink(missing_ok=True)
        os.close(self._fd)

    def __enter__(self) -> OutputLock:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

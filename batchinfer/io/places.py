"""Where the output goes, which files stand beside it, and what is refused before any work is done."""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from batchinfer.errors import ConfigError, OutputConflict, OutputError
from batchinfer.io.delivery import HERE, Delivery, Upload
from batchinfer.io.find import default_stem
from batchinfer.io.options import Shard
from batchinfer.io.remote import is_remote
from batchinfer.io.source import InputFiles

LONGEST_ENDING = ".manifest.json.tmp"  # of the names that stand beside an output
SUFFIXES = (".jsonl", ".ndjson", ".parquet")


@dataclass(frozen=True, slots=True)
class Places:
    """The output and the files that belong to it; for one in a store, where these stand until they are delivered."""

    output: Path
    delivery: Delivery = HERE

    @property
    def shown(self) -> str:
        """What people call the output."""
        return self.delivery.address(self.output)

    @property
    def has_output(self) -> bool:
        """True when there is an output already, of whatever job."""
        return self.delivery.has(self.output)

    def _beside(self, ending: str) -> Path:
        return self.output.with_name(self.output.name + ending)

    @property
    def partial(self) -> Path:
        """Finished rows, as they finish."""
        return self._beside(".partial")

    @property
    def manifest(self) -> Path:
        """What the partial results belong to."""
        return self._beside(".manifest.json")

    @property
    def report(self) -> Path:
        """Stays when the job is done."""
        return self._beside(".report.json")

    @property
    def lock(self) -> Path:
        """Held by the job that writes."""
        return self._beside(".lock")

    @property
    def spool(self) -> Path:
        """What came from stdin."""
        return self._beside(".stdin")

    def tidy(self) -> None:
        """Remove the working files of a job that has no result."""
        if not (self.partial.exists() and self.partial.stat().st_size):
            for path in (self.partial, self.manifest, self.spool):
                path.unlink(missing_ok=True)

    def remove_temporaries(self) -> None:
        """Remove files that a process leaves when it ends in the middle of writing them, and its lock."""
        errors = self.output.with_name(self.output.stem + ".errors.jsonl")
        written = (self.output, errors, self.manifest, self.report, self.partial, self.spool)
        for path in (*(path.with_name(path.name + ".tmp") for path in written), self.lock):
            path.unlink(missing_ok=True)

    @property
    def is_parquet(self) -> bool:
        """True when the output is a Parquet file."""
        return self.output.suffix.lower() == ".parquet"


def default_name(files: InputFiles, shard: Shard | None = None) -> Path:
    """The output's name when none is given: beside a file, in the current folder for anything else. Each shard has its own."""
    part = "" if shard is None else f".{shard.tag}"
    ending = part + (".out.parquet" if files.is_table else ".out.jsonl")
    if files.streamed:
        return Path("stdin" + ending)
    name = default_stem(files) + ending
    return Path(name) if files.home is not None else files.paths[0].with_name(name)


def is_streamed(given: str | None) -> bool:
    """True for outputs that are written as they come: stdout, pipes, devices."""
    if given == "-":
        return True
    try:
        mode = os.stat(given).st_mode if given is not None else 0
    except OSError:
        return False
    return bool(mode) and not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def find_places(given: str | None, files: InputFiles, shard: Shard | None = None) -> Places:
    """The output's place, or an error when nothing can ever be written there."""
    if given is not None and is_remote(given):
        return _remote_places(given, files)
    path = Path(given) if given is not None else default_name(files, shard)
    _check_length(path)
    if path.is_dir():
        raise OutputConflict(f"{path}: the output is a folder; give a file name ending in .jsonl or .parquet")
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"-o {path}: the name must end in .jsonl or .parquet (or be - for stdout)")
    if any(_same_file(path, source) for source in files.paths):
        raise OutputConflict(f"{path}: the output is the input; give another name with -o")
    if not path.parent.is_dir():
        raise OutputError(f"{path}: the folder {path.parent} does not exist; make it first")
    if path.is_symlink():  # write what the link means, and leave the link alone
        path = Path(os.path.realpath(path))
        _check_length(path)
        if not path.parent.is_dir():
            raise OutputError(f"{path}: the link's folder {path.parent} does not exist")
    return Places(path)


def _remote_places(given: str, files: InputFiles) -> Places:
    if not given.lower().partition("?")[0].endswith(SUFFIXES):
        raise ConfigError(f"-o {given}: the name must end in .jsonl or .parquet")
    delivery, path = Upload.to(given)
    places = Places(path, delivery)
    if any(file.label == places.shown for file in files.files):
        raise OutputConflict(f"{places.shown}: the output is the input; give another name with -o")
    _check_length(path)
    if not places.partial.exists():
        delivery.fetch(places.report)  # of a job that was finished, here or elsewhere
    return places


def _check_length(path: Path) -> None:
    """Raise `ConfigError` when the file system has no room for the name and for those beside it."""
    try:
        os.lstat(f"{path}{LONGEST_ENDING}")
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise ConfigError(
                f"-o {str(path)[:60]}...: the name is too long for the file system: {len(os.fsencode(path.name)):,} bytes, and working "
                f"files beside it need {len(LONGEST_ENDING)} more; give a shorter one"
            ) from None


def _same_file(path: Path, source: Path) -> bool:
    try:
        if os.path.realpath(path) == os.path.realpath(source):
            return True
        return path.exists() and os.path.samefile(path, source)
    except OSError:
        return False

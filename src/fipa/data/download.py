"""Downloads that are checked and can be gone on with, and archives that are unpacked whole or not at all."""

from __future__ import annotations

import hashlib
import http.client
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from fipa.errors import FipaError

CHUNK = 1 << 18
TARS = (".tar.gz", ".tgz", ".tar")

# bytes so far, and in all if the server says
Progress = Callable[[int, int | None], None]


@dataclass(frozen=True)
class Remote:
    """A file to download, and the MD5 digest that it must have."""

    url: str
    md5: str

    @property
    def name(self) -> str:
        """The file's own name."""
        return self.url.rpartition("/")[2]


def download(remote: Remote, folder: Path, progress: Progress | None = None, timeout: float = 30.0) -> Path:
    """Fetch a file into a folder, unless it is there already.

    Bytes are gathered in a `.part` file. Where that was left behind, or the connection breaks, the rest is asked for;
    a server that sends the whole file all the same is heard from the start. An attempt that brings nothing new is the
    last.
    """
    if not remote.url.startswith(("https://", "http://")):
        raise FipaError(f"{remote.url}: only http and https can be downloaded")
    target = folder / remote.name
    if target.exists() and md5(target) == remote.md5:
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FipaError(f"{folder} cannot be made: {error.strerror}; choose another folder") from error
    part = folder / f"{remote.name}.part"
    best = _size(part)
    while problem := _attempt(remote.url, part, progress, timeout):
        size = _size(part)
        if size <= best:
            raise FipaError(
                f"{remote.url}: {problem}, after {size} bytes; try again to resume from there, or put the file into "
                f"{folder} by hand"
            )
        best = size
    if (found := md5(part)) != remote.md5:
        part.unlink()
        raise FipaError(
            f"{remote.url} has MD5 {found}, not {remote.md5}: it was damaged on the way or has changed. What came was "
            "deleted; try again"
        )
    return part.replace(target)


def md5(file: Path) -> str:
    """The digest of a file."""
    digest = hashlib.md5(usedforsecurity=False)
    with file.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def is_archive(name: str) -> bool:
    """Whether `extract` can unpack it."""
    return name.endswith((*TARS, ".zip"))


def extract(archive: Path, folder: Path) -> None:
    """Unpack into a folder: what an archive holds appears there once all of it has been unpacked.

    Nothing is written outside of the folder; files that are there already are replaced.
    """
    with tempfile.TemporaryDirectory(prefix=".unpack-", dir=folder) as temporary:
        try:
            if archive.name.endswith(TARS):
                with tarfile.open(archive) as tar:
                    tar.extractall(temporary, filter="data")
            else:
                with zipfile.ZipFile(archive) as packed:
                    _check_names(packed.namelist())
                    packed.extractall(temporary)
        except (tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error, ValueError) as error:
            reason = str(error).partition(":\n")[0]  # of several lines, the first
            raise FipaError(f"{archive} cannot be unpacked: {reason}. Delete it, and get it again") from error
        except OSError as error:
            raise FipaError(f"{archive} cannot be unpacked: {error}") from error
        _move(Path(temporary), folder)


def _attempt(url: str, part: Path, progress: Progress | None, timeout: float) -> str | None:
    """Append what the server sends to the part file; say what went wrong, if something did."""
    done = _size(part)
    request = Request(url, headers={"User-Agent": "fipa"} | ({"Range": f"bytes={done}-"} if done else {}))
    try:
        with urlopen(request, timeout=timeout) as response:
            if response.status != 206:
                done = 0
            elif not (response.headers["Content-Range"] or "").startswith(f"bytes {done}-"):
                return "the server sent another range than it was asked for"
            length = response.headers["Content-Length"]
            total = done + int(length) if length else None
            with part.open("ab" if done else "wb") as stream:
                while chunk := response.read(CHUNK):
                    stream.write(chunk)
                    done += len(chunk)
                    if progress is not None:
                        progress(done, total)
    except HTTPError as error:
        if error.code == 416 and done:  # nothing beyond the bytes we have
            return None
        return f"the server answered {error.code} {error.reason}"
    except (OSError, http.client.HTTPException) as error:
        return str(getattr(error, "reason", error)) or type(error).__name__
    return None if total is None or done == total else "the connection was cut"


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _check_names(names: list[str]) -> None:
    for name in names:
        path = PurePosixPath(name.replace("\\", "/"))
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"{name} would lie outside of the folder")


def _move(source: Path, target: Path) -> None:
    """Move what a folder holds into another, folders into folders."""
    for entry in sorted(source.iterdir()):
        goal = target / entry.name
        if entry.is_dir() and goal.is_dir():
            _move(entry, goal)
        else:
            entry.replace(goal)

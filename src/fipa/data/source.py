"""Where an image set lies on disk, and where it comes from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fipa.data.download import Progress, Remote, download, extract, is_archive
from fipa.data.images import ImageSet
from fipa.errors import FipaError


@dataclass(frozen=True)
class Source:
    """An image set by its name.

    Parameters
    ----------
    name, title
        As users type it, and as it is written.
    classes, images, shape
        What the official set holds: classes, training and test images, and (channels, height, width).
    read
        Reads the set from its folder.
    folders
        Where it may lie under the root, the usual place first. An absolute path is taken as it is.
    files
        What the folder must hold.
    endings
        Each of `files` may end in any of these.
    remote
        What to download: archives, which hold the folder, or single files, which belong in it.
    """

    name: str
    title: str
    classes: int
    images: tuple[int, int]
    shape: tuple[int, int, int]
    read: Callable[[Path], ImageSet]
    folders: tuple[str, ...]
    files: tuple[str, ...]
    endings: tuple[str, ...] = ("",)
    remote: tuple[Remote, ...] = ()

    def find(self, root: Path) -> Path | None:
        """The folder that holds the set, if there is one."""
        return next((root / folder for folder in self.folders if self._complete(root / folder)), None)

    def load(self, root: Path) -> ImageSet:
        """Read the set from under `root`."""
        folder = self.find(root)
        if folder is None:
            places = " or ".join(str(root / place) for place in self.folders)
            raise FipaError(
                f"{self.name} is not there: looked for {', '.join(self.files)} in {places}. Get it with "
                f"`fipa data get {self.name}`, or name the folder that holds your sets with --data or FIPA_DATA"
            )
        return self.read(folder)

    def get(self, root: Path, progress: Progress | None = None) -> Path:
        """Download what is missing, and return the folder. `progress` is told of each file from its first byte on."""
        if found := self.find(root):
            return found
        for remote in self.remote:
            if is_archive(remote.name):
                archive = download(remote, root, progress)
                extract(archive, root)
                archive.unlink()
            else:
                download(remote, root / self.folders[0], progress)
        folder = self.find(root)
        if folder is None:
            raise FipaError(
                f"{self.name}: what was downloaded lacks some of {', '.join(self.files)}: report this to us"
            )
        return folder

    def _complete(self, folder: Path) -> bool:
        return all(any((folder / (file + ending)).exists() for ending in self.endings) for file in self.files)

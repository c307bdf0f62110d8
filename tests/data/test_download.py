"""Downloads from a server that heeds ranges, or does not, or hangs up, or sends something else."""

from __future__ import annotations

import io
import random
import tarfile
import zipfile
from pathlib import Path

import pytest

from fipa.data import download as module
from fipa.data.download import Remote, download, extract
from fipa.errors import FipaError

CONTENT = random.Random(0).randbytes(50_000)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 4_000)


def test_whole_file(server, tmp_path):
    seen = []
    file = download(server.remote("a.gz", CONTENT), tmp_path / "new", lambda *progress: seen.append(progress))
    assert file == tmp_path / "new" / "a.gz"
    assert file.read_bytes() == CONTENT
    assert [p.name for p in file.parent.iterdir()] == ["a.gz"]
    assert seen[-1] == (50_000, 50_000)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert len(seen) > 10


def test_a_file_that_is_there_is_not_fetched_again(server, tmp_path):
    remote = server.remote("a.gz", CONTENT)
    download(remote, tmp_path)
    download(remote, tmp_path)
    assert server.asked == [None]
    (tmp_path / "a.gz").write_bytes(b"something else")
    assert download(remote, tmp_path).read_bytes() == CONTENT


def test_a_part_is_gone_on_with(server, tmp_path):
    remote = server.remote("a.gz", CONTENT)
    (tmp_path / "a.gz.part").write_bytes(CONTENT[:20_000])
    seen = []
    assert download(remote, tmp_path, lambda *progress: seen.append(progress)).read_bytes() == CONTENT
    assert server.asked == ["bytes=20000-"]
    assert seen[0][0] > 20_000
    assert seen[-1] == (50_000, 50_000)


def test_server_without_ranges_is_heard_from_the_start(server, tmp_path):
    server.ranges = False
    remote = server.remote("a.gz", CONTENT)
    (tmp_path / "a.gz.part").write_bytes(b"x" * 20_000)
    assert download(remote, tmp_path).read_bytes() == CONTENT
    assert server.asked == ["bytes=20000-"]


def test_server_that_does_not_say_how_long_a_file_is(server, tmp_path):
    server.length = False
    seen = []
    assert download(server.remote("a.gz", CONTENT), tmp_path, lambda *p: seen.append(p)).read_bytes() == CONTENT
    assert seen[-1] == (50_000, None)


def test_a_cut_connection_is_taken_up_again(server, tmp_path):
    server.cuts = [10_000, 25_000]
    assert download(server.remote("a.gz", CONTENT), tmp_path).read_bytes() == CONTENT
    assert server.asked == [None, "bytes=10000-", "bytes=35000-"]


def test_a_connection_that_brings_nothing_new_ends_it(server, tmp_path):
    server.cuts = [10_000, 0]
    remote = server.remote("a.gz", CONTENT)
    with pytest.raises(FipaError, match="the connection was cut, after 10000 bytes; try again to resume from there"):
        download(remote, tmp_path)
    assert (tmp_path / "a.gz.part").read_bytes() == CONTENT[:10_000]
    assert download(remote, tmp_path).read_bytes() == CONTENT


def test_cut_again_and_again_without_ranges_does_not_go_on_for_ever(server, tmp_path):
    server.ranges = False
    server.cuts = [10_000] * 100
    with pytest.raises(FipaError, match="the connection was cut"):
        download(server.remote("a.gz", CONTENT), tmp_path)
    assert len(server.asked) == 2


def test_another_range_than_asked_for(server, tmp_path):
    server.shift = 100
    (tmp_path / "a.gz.part").write_bytes(CONTENT[:20_000])
    with pytest.raises(FipaError, match="another range"):
        download(server.remote("a.gz", CONTENT), tmp_path)
    assert (tmp_path / "a.gz.part").stat().st_size == 20_000


def test_a_part_that_is_whole_already(server, tmp_path):
    (tmp_path / "a.gz.part").write_bytes(CONTENT)
    assert download(server.remote("a.gz", CONTENT), tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize(
    "left", [b"", CONTENT[:10], b"x" * 10, b"x" * 60_000], ids=["none", "some", "another's", "too much"]
)
def test_wrong_digest(server, tmp_path, left):
    right = server.remote("a.gz", CONTENT)
    if left:
        (tmp_path / "a.gz.part").write_bytes(left)
    wrong = right if left.startswith(b"x") else Remote(right.url, "0" * 32)
    with pytest.raises(FipaError, match=f"not {wrong.md5}.*deleted; try again"):
        download(wrong, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert download(right, tmp_path).read_bytes() == CONTENT


def test_errors_name_the_address(server, tmp_path):
    server.remote("a.gz", CONTENT)
    url = f"http://127.0.0.1:{server.server_port}/b.gz"
    with pytest.raises(FipaError, match=r"/b.gz: the server answered 404 Not Found.*by hand"):
        download(Remote(url, "0"), tmp_path)
    with pytest.raises(FipaError, match=r"127.0.0.1:9/b.gz: .*refused"):
        download(Remote("http://127.0.0.1:9/b.gz", "0"), tmp_path)
    with pytest.raises(FipaError, match="only http and https"):
        download(Remote(f"file://{tmp_path}/b.gz", "0"), tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(FipaError, match=r"file cannot be made.*choose another folder"):
        download(Remote(url, "0"), tmp_path / "file")


# --- archives ---


def tar(file: Path, entries: dict[str, bytes | None]) -> Path:
    """Of None, a link to the root folder."""
    with tarfile.open(file, "w:gz") as archive:
        for name, content in entries.items():
            entry = tarfile.TarInfo(name)
            if content is None:
                entry.type, entry.linkname = tarfile.SYMTYPE, "/"
            entry.size = len(content or b"")
            archive.addfile(entry, io.BytesIO(content or b""))
    return file


def packed(file: Path, entries: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return file


@pytest.mark.parametrize(("pack", "name"), [(tar, "a.tar.gz"), (packed, "a.zip")])
def test_extract(tmp_path, pack, name):
    archive = pack(tmp_path / name, {"set/one": b"1", "set/sub/two": b"2"})
    (tmp_path / "set" / "sub").mkdir(parents=True)
    (tmp_path / "set" / "sub" / "two").write_bytes(b"half")
    (tmp_path / "set" / "own").write_bytes(b"mine")
    for _ in range(2):
        extract(archive, tmp_path)
        files = {p.name: p.read_bytes() for p in (tmp_path / "set").rglob("*") if p.is_file()}
        assert files == {"one": b"1", "two": b"2", "own": b"mine"}
    assert sorted(p.name for p in tmp_path.iterdir()) == [name, "set"]


@pytest.mark.parametrize("name", ["../evil", "{}/evil", "set/../../evil"])
def test_nothing_is_written_outside(tmp_path, name):
    name, inside = name.format(tmp_path), tmp_path / "in"
    inside.mkdir()
    for archive in (tar(tmp_path / "a.tar.gz", {"fine": b"", name: b""}), packed(tmp_path / "a.zip", {name: b""})):
        before = set(tmp_path.rglob("*"))
        if name.startswith("/") and archive.suffix == ".gz":
            extract(archive, inside)  # tar's filter takes the slash away
            assert (inside / name[1:]).exists()
            assert not Path(name).exists()
        else:
            with pytest.raises(FipaError, match=f"{archive.name} cannot be unpacked: .*outside"):
                extract(archive, inside)
            assert set(tmp_path.rglob("*")) == before


def test_links_out_of_the_folder_are_refused(tmp_path):
    with pytest.raises(FipaError, match="cannot be unpacked"):
        extract(tar(tmp_path / "a.tar.gz", {"link": None}), tmp_path)


def test_broken_archives_leave_nothing_behind(tmp_path):
    whole = tar(tmp_path / "whole.tar.gz", {"set/one": CONTENT, "set/two": CONTENT}).read_bytes()
    for name, content in [("a.tar.gz", whole[:60_000]), ("b.tar.gz", b"no"), ("c.zip", b"PK no"), ("d.tar.gz", b"")]:
        (tmp_path / name).write_bytes(content)
        before = set(tmp_path.rglob("*"))
        with pytest.raises(FipaError, match=f"{name} cannot be unpacked.*get it again"):
            extract(tmp_path / name, tmp_path)
        assert set(tmp_path.rglob("*")) == before

# SPDX-License-Identifier: Apache-2.0
"""Files of a build: folders that are never shared, archives that are not trusted, ends of logs."""

from __future__ import annotations

import io
import tarfile

from statescan.doctor.builder import files


def archive(path, **members):
    with tarfile.open(path, "w:gz") as opened:
        for name, content in members.items():
            row = tarfile.TarInfo(name)
            row.size = len(content)
            opened.addfile(row, io.BytesIO(content))
    return path


def test_a_folder_with_files_is_never_used_again(tmp_path):
    folder = tmp_path / "work"
    assert files.fresh_folder(folder) == folder
    folder.mkdir()
    assert files.fresh_folder(folder) == folder
    (folder / "build.log").touch()
    assert files.fresh_folder(folder) == tmp_path / "work-2"
    (tmp_path / "work-2").mkdir()
    (tmp_path / "work-2" / "build.log").touch()
    assert files.fresh_folder(folder) == tmp_path / "work-3"


def test_a_source_package_is_unpacked_to_its_folder(tmp_path):
    path = archive(tmp_path / "a.tar.gz", **{"x-1/setup.py": b"", "x-1/csrc/a.cu": b"int a;"})
    found = files.unpacked(path, tmp_path / "source")
    assert found == tmp_path / "source" / "x-1"
    assert (found / "csrc" / "a.cu").read_bytes() == b"int a;"


def test_nothing_is_written_outside_the_folder(tmp_path):
    path = archive(tmp_path / "a.tar.gz", **{"x-1/setup.py": b"", "../evil": b"", "/evil2": b""})
    assert files.unpacked(path, tmp_path / "source") == tmp_path / "source" / "x-1"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.tar.gz", "source"]


def test_links_are_left_out(tmp_path):
    path = tmp_path / "a.tar.gz"
    with tarfile.open(path, "w:gz") as opened:
        opened.addfile(tarfile.TarInfo("x-1/setup.py"))
        link = tarfile.TarInfo("x-1/out")
        link.type, link.linkname = tarfile.SYMTYPE, "/"
        opened.addfile(link)
    assert files.unpacked(path, tmp_path / "source") is not None
    assert not (tmp_path / "source" / "x-1" / "out").is_symlink()


def test_a_damaged_archive_or_one_without_setup_is_none(tmp_path):
    broken = tmp_path / "a.tar.gz"
    whole = archive(tmp_path / "b.tar.gz", **{"x-1/setup.py": bytes(5000)})
    broken.write_bytes(whole.read_bytes()[:40])
    assert files.unpacked(broken, tmp_path / "source") is None
    other = archive(tmp_path / "c.tar.gz", **{"x-1/readme": b""})
    assert files.unpacked(other, tmp_path / "source") is None


def test_the_end_of_a_log(tmp_path):
    log = tmp_path / "log"
    log.write_bytes(b"x" * 20_000 + b"\n" + b"".join(b"line %d\n\n" % n for n in range(20)))
    assert files.tail(log) == tuple(f"line {number}" for number in range(8, 20))

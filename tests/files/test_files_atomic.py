"""Files appear whole or not at all, whatever stops the writer, and keep the rights they had."""

import os
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import demask
from demask.errors import BadInput
from demask.files.atomic_write import check_writable, temporary_folder, write


def test_files_appear_whole_or_not_at_all(tmp_path):
    path = tmp_path / "out"
    with write(path) as file:
        file.write(b"one")
        assert not path.exists()
    with pytest.raises(KeyError), write(path) as file:
        file.write(b"two")
        raise KeyError("stop")
    assert path.read_bytes() == b"one" and os.listdir(tmp_path) == ["out"]


def test_unwritable_paths_are_known_before_work(tmp_path, monkeypatch):
    with pytest.raises(BadInput, match="does not exist"):
        check_writable(tmp_path / "no" / "file")
    with pytest.raises(BadInput, match="is a folder"):
        check_writable(tmp_path)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(BadInput, match="no permission"):
        check_writable(tmp_path / "file")


def test_a_file_that_is_replaced_hands_its_rights_on(tmp_path):
    path, link = tmp_path / "out", tmp_path / "link"
    link.symlink_to(path)
    for mode in (0o600, 0o644, 0o700):
        path.write_bytes(b"old")
        path.chmod(mode)
        with write(link) as file:  # through a link, to the file that it leads to
            file.write(b"new")
            assert not stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077
        assert stat.S_IMODE(path.stat().st_mode) == mode and path.read_bytes() == b"new"
    assert link.is_symlink() and sorted(os.listdir(tmp_path)) == ["link", "out"]


def test_a_file_of_another_group_is_closed_to_the_writers(tmp_path, monkeypatch):
    """Where the owner cannot be the same, no other group gets the rights of the first."""

    def refused(*_):
        raise PermissionError

    path = tmp_path / "out"
    path.write_bytes(b"old")
    path.chmod(0o640)
    os.chown(path, -1, os.getgid() + 1) if os.geteuid() == 0 else pytest.skip("needs root")
    monkeypatch.setattr(os, "fchown", refused)
    with write(path) as file:
        file.write(b"new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: os.mkfifo(path), "a pipe"),
        (lambda path: path.symlink_to("/dev/null"), "a device"),
        (lambda path: path.symlink_to(path), "cannot write"),
        (lambda path: path.mkdir(), "a folder"),
    ],
)
def test_what_is_no_regular_file_is_not_replaced(tmp_path, make, words):
    path = tmp_path / "out"
    make(path)
    before = os.lstat(path)
    with pytest.raises(BadInput, match=words), write(path):
        raise AssertionError("opened")
    assert os.lstat(path) == before and os.listdir(tmp_path) == ["out"]


def test_names_as_long_as_can_be_are_written_and_longer_ones_refused(tmp_path):
    with write(tmp_path / ("n" * 255)) as file:
        file.write(b"new")
    for name in ("n" * 256, "a\0b"):
        with pytest.raises(BadInput, match="another name"):
            check_writable(tmp_path / name)


KILLED = """
import os, signal, sys, types
sys.modules["demask"] = types.ModuleType("demask")  # without torch
sys.modules["demask"].__path__ = [sys.argv[2]]
from demask.files.atomic_write import write
with write(sys.argv[1]) as file:
    file.write(b"half")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


KILLED_IN_FOLDER = (
    KILLED.partition("from demask")[0]
    + """
from demask.files.atomic_write import temporary_folder
with temporary_folder() as folder:
    (folder / "half").write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
"""
)


def test_folders_that_a_killed_process_left_are_removed(tmp_path, monkeypatch):
    code = ["-c", KILLED_IN_FOLDER, "", demask.__path__[0]]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    killed = subprocess.run([sys.executable, *code], env=environment)
    assert killed.returncode == -signal.SIGKILL and len(os.listdir(tmp_path)) == 1
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with temporary_folder() as first, temporary_folder() as second:
        (first / "file").write_bytes(b"whole")
        assert set(os.listdir(tmp_path)) == {first.name, second.name}
    assert not os.listdir(tmp_path)


def test_what_a_killed_process_left_is_removed_and_what_a_live_one_writes_is_not(tmp_path):
    path, code = tmp_path / "out", ["-c", KILLED, str(tmp_path / "out"), demask.__path__[0]]
    assert subprocess.run([sys.executable, *code]).returncode == -signal.SIGKILL
    assert len(os.listdir(tmp_path)) == 1 and not path.exists()
    with write(path) as file, write(tmp_path / "other"):  # which finds the first at work
        file.write(b"whole")
        assert len(os.listdir(tmp_path)) == 2
    assert path.read_bytes() == b"whole" and sorted(os.listdir(tmp_path)) == ["other", "out"]


def test_a_temporary_folder_that_another_process_removes_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other process takes it for stale, since it is not locked yet."""
    real, names = tempfile.mkdtemp, []

    def removed_at_first(**options: str) -> str:
        names.append(real(**options))
        if len(names) == 1:
            Path(names[0]).rmdir()
        return names[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", removed_at_first)
    with temporary_folder() as folder:
        assert str(folder) == names[1] and folder.is_dir()

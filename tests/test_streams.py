"""What is printed and cannot be written is dropped: no exception, no other exit code, no second try at the end."""

import os
import subprocess
import sys

import pytest

from precision_lab.config import ROOT
from precision_lab.streams import lossy

TALK = """
import sys
from precision_lab.entry import print_what_can_be

print_what_can_be()
for stream in (sys.stdout, sys.stderr):
    for n in range(3000):
        print("a line \\u00fc \\udcff", n, file=stream)
    stream.flush()
sys.exit(7)
"""


def talk(stdout, stderr=subprocess.PIPE):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONIOENCODING": "utf-8"}
    words = [sys.executable, "-c", TALK]
    return subprocess.run(words, stdout=stdout, stderr=stderr, env=environment, timeout=30, check=False)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full, which is always full")
def test_a_full_disk_changes_no_exit_code():
    with open("/dev/full", "wb") as full:
        done = talk(full)
        assert done.returncode == 7
        assert done.stderr.count(b"\n") == 3000  # its own lines, and no word of the other stream
        assert b"rror" not in done.stderr
        assert talk(full, full).returncode == 7


def test_a_reader_that_has_gone_changes_no_exit_code():
    read, write = os.pipe()
    os.close(read)
    done = talk(write)
    os.close(write)
    assert (done.returncode, done.stderr.count(b"\n")) == (7, 3000)


def test_what_can_be_written_is(tmp_path):
    with (tmp_path / "out").open("wb") as out:
        assert talk(out).returncode == 7
    assert (tmp_path / "out").read_text().splitlines() == [f"a line \u00fc \\udcff {n}" for n in range(3000)]


def test_a_log_is_continued_and_each_line_is_there_at_once(tmp_path):
    (tmp_path / "log").write_text("before\n")
    with lossy(tmp_path / "log") as log:
        log.write("after\n")
        assert (tmp_path / "log").read_text() == "before\nafter\n"


def test_a_log_that_cannot_be_opened_is_told(tmp_path):
    with pytest.raises(FileNotFoundError):
        lossy(tmp_path / "no" / "log")


def test_a_file_descriptor_stays_open(tmp_path):
    number = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    lossy(number).close()
    os.write(number, b"more")
    os.close(number)
    assert (tmp_path / "log").read_bytes() == b"more"

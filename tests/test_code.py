"""Which code a run is said to be made of: found on sys.path, and nothing imported."""

import re
import shutil
import sys
from dataclasses import replace

import pytest

from precision_lab import code, config
from precision_lab.code import code_of


@pytest.fixture
def asked():
    return config.compose(["precision=fp32"])


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def own(asked, target):
    return replace(asked, model={"_target_": target})


def test_what_is_shipped_is_one_hash(asked):
    told = code_of(asked)
    assert set(told) == {"precision_lab"}  # torch.optim.AdamW is known by torch's version
    assert re.fullmatch("[0-9a-f]{8}", told["precision_lab"])


@pytest.mark.parametrize(
    ("file", "changes"),
    [("trainer.py", True), ("probe/memory.py", True), ("report/page.py", False), ("sweep/view.py", False)],
)
def test_what_trains_counts_and_what_reports_does_not(asked, tmp_path, monkeypatch, file, changes):
    copy = tmp_path / "precision_lab"
    shutil.copytree(code.PACKAGE, copy)
    monkeypatch.setattr(code, "PACKAGE", copy)
    before = code_of(asked)
    with (copy / file).open("a") as changed:
        changed.write("# one more line\n")
    assert (code_of(asked) != before) is changes


@pytest.mark.parametrize("file", ["net.py", "net/__init__.py"])
@pytest.mark.parametrize("target", ["net.Net", "net.Net.small"])
def test_a_file_of_the_users_own_is_read_and_not_imported(asked, place, file, target):
    (place / file).parent.mkdir(exist_ok=True)
    (place / file).write_text("raise SystemExit('imported')")
    before = code_of(own(asked, target))
    assert set(before) == {"precision_lab", "model"}
    (place / file).write_text("raise SystemExit('imported again')")
    after = code_of(own(asked, target))
    assert after["model"] != before["model"]
    assert after["precision_lab"] == before["precision_lab"]
    assert "net" not in sys.modules


def test_the_deepest_file_is_the_one(asked, place):
    (place / "nets").mkdir()
    (place / "nets" / "__init__.py").write_text("")
    (place / "nets" / "small.py").write_text("one")
    before = code_of(own(asked, "nets.small.Net"))["model"]
    (place / "nets" / "__init__.py").write_text("changed")
    assert code_of(own(asked, "nets.small.Net"))["model"] == before
    (place / "nets" / "small.py").write_text("two")
    assert code_of(own(asked, "nets.small.Net"))["model"] != before


def test_what_cannot_be_found_is_left_out(asked):
    assert set(code_of(own(asked, "no_such_module.Net"))) == {"precision_lab"}

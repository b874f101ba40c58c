"""README and docs: every command in them is right, every link and file in them is there.

By default each command of train.py is checked (composed, its model and data built) and the others are run where they
take seconds; the slow test runs every line as it is typed, in a copy of the repository.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser

from precision_lab import check, config, identity
from precision_lab.run import run
from precision_lab.terminal import CHECKED

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXT = {page: page.read_text(encoding="utf-8") for page in PAGES}


def blocks(language):
    """(page, what stands before the block in its paragraph, the block) of each fenced block of a language."""
    for page, text in TEXT.items():
        for match in re.finditer(rf"([^\n]*)\n\n```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            yield page, match.group(1), match.group(2)


def commands():
    """Every line of the bash blocks, continued ones joined, without its comment."""
    for _, _, block in blocks("bash"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words:
                yield words


def named_files():
    """(path, content) of what the pages tell the reader to write: `my/code/mine.py`: and a block."""
    for language in ("python", "yaml"):
        for _, before, block in blocks(language):
            if name := re.search(r"`([\w/]+\.(?:py|yaml))`:$", before):
                yield Path(name.group(1)), block


def write_named_files(folder):
    for path, block in named_files():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(block)


ALL = list(commands())
TRAIN = [words for words in ALL if "train.py" in words and "--help" not in words]
KINDS = {"source", "make", "pip", "python", "wandb"}


def test_the_pages_have_commands_and_no_kind_of_them_goes_unchecked():
    assert len(TRAIN) >= 10
    first = {next(word for word in words if not re.match(r"\w+=", word)) for words in ALL}
    assert first <= KINDS
    assert {words[words.index("python") + 1] for words in ALL if "python" in words} <= {
        "train.py",
        "scripts/compare.py", "scripts/inspect_ops.py", "scripts/demo.py", "scripts/benchmark.py",
        "scripts/largest_batch.py", "scripts/selfcheck.py", "scripts/diagnose.py",
        "scripts/mirror.py", "scripts/publish.py",
    }  # fmt: skip


@pytest.fixture
def written(tmp_path, monkeypatch):
    """The files that the pages tell to write, at hand as they say; precisions beside the shipped ones."""
    write_named_files(tmp_path)
    conf = tmp_path / "conf"
    shutil.copytree(ROOT / "conf", conf, dirs_exist_ok=True)
    for module in (config, identity):
        if hasattr(module, "CONF"):
            monkeypatch.setattr(module, "CONF", conf)
    monkeypatch.setattr(config, "ROOT", tmp_path)
    return tmp_path


def jobs_of(words):
    """The overrides of each run that a command of train.py starts."""
    overrides = [word for word in words[words.index("train.py") + 1 :] if word != "-m"]
    if "-m" not in words:
        return [overrides]
    parsed = OverridesParser.create().parse_overrides(overrides)
    (batch,) = BasicSweeper.split_arguments(parsed, None)
    return batch


@pytest.mark.parametrize("words", TRAIN, ids=shlex.join)
def test_a_command_of_train_py_checks_out(words, written, monkeypatch, capsys):
    monkeypatch.setattr(check, "LIMIT_S", 0.0)  # one step is enough
    for word in words:
        if word.startswith("PYTHONPATH="):
            monkeypatch.syspath_prepend(str(written / word.partition("=")[2]))
    targets = [word.partition("=")[2] for word in words if "_target_=" in word]
    away = [target for target in targets if find_spec(target.partition(".")[0]) is None]
    for overrides in jobs_of(words):
        asked = config.compose(overrides)
        if away:  # a package that the page tells to install first
            assert ["pip", "install", away[0].partition(".")[0]] in ALL
            continue
        assert run(replace(asked, check=True)) == 0
        assert capsys.readouterr().out.endswith(f"{CHECKED}\n")


@pytest.mark.parametrize("words", [words for words in ALL if words[0] == "make"], ids=shlex.join)
def test_a_target_of_make_exists(words):
    done = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_targets_and_files_that_the_text_names_exist():
    for page, text in TEXT.items():
        for target in re.findall(r"`make ([a-z-]+)", text):
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), (page, target)
        for link in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (page.parent / link).exists(), (page, link)
        written_by_the_reader = {str(path) for path, _ in named_files()}
        for name in re.findall(r"`((?:src|conf|scripts|tests|docs)/[\w./-]+)`", text):
            assert (ROOT / name).exists() or name in written_by_the_reader, (page, name)


def test_keys_that_the_text_names_exist():
    asked = identity.as_values(config.compose([]))
    for page, text in TEXT.items():
        pattern = r"`(trainer|precision|meter|probe|device|wandb|paths)\.(?!py`|json`)([a-z_0-9]+)[`=]"
        for group, key in re.findall(pattern, text):
            assert key in asked[group], (page, group, key)


@pytest.mark.slow
def test_every_line_runs_as_it_is_typed(tmp_path):
    """In the order of the pages and in a copy of the repository; what installs, and make, are left out."""
    copy = tmp_path / "lab"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv*", "outputs", "__pycache__", "data"))
    write_named_files(copy)
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "WANDB_MODE": "offline"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(copy / "src")}
    for words in ALL:
        program = next(word for word in words if not re.match(r"\w+=", word))
        missing = any("timm" in word for word in words) and find_spec("timm") is None
        if program != "python" or missing:
            continue
        line = (
            shlex.join(words)
            .replace("'PYTHONPATH=my/code'", "PYTHONPATH=my/code")
            .replace("PYTHONPATH=my/code", f"PYTHONPATH=my/code:{copy / 'src'}")
        )
        done = subprocess.run(line, shell=True, cwd=copy, env=environment, capture_output=True, text=True, timeout=600)
        finds = "diagnose.py" in line and "lesson_sensitive" in line
        assert done.returncode == (3 if finds else 0), f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"

"""The scripts that measure and look: they run, and refuse in a sentence."""

import importlib.util
import re

import pytest

from precision_lab.config import ROOT
from typed_scripts import run

SECRET = "hunter2-0123456789abcdef"


def refused(script: str, *words: str) -> str:
    done = run(script, *words, SOME_API_KEY=SECRET)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.fixture
def bench_loop():
    """The script as a module, to be run on a model so small that it takes seconds."""
    spec = importlib.util.spec_from_file_location("bench_loop", ROOT / "scripts" / "bench_loop.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_loop_is_measured_against_one_by_hand(bench_loop, monkeypatch, capsys):
    monkeypatch.setattr(bench_loop, "width_for", lambda milliseconds: 8)
    counted = []
    own = bench_loop.ratio_of
    monkeypatch.setattr(bench_loop, "ratio_of", lambda rounds: counted.append(sum(map(len, rounds))) or own(rounds))
    assert bench_loop.main(["pairs=10"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "MLP 256-8-8-10, batch 64, one thread, 10 pairs"
    ratio = re.compile(r"(fp32|bf16) by a loop .*: ratio ([\d.]+) \[([\d.]+), ([\d.]+)\] of [\d.]+ ms a step")
    found = [ratio.fullmatch(line).groups() for line in lines]
    assert [arm for arm, *_ in found] == ["fp32"] * 3 + ["bf16"] * 3
    assert counted == [10] * 6
    assert all(0 < float(low) <= float(middle) <= float(high) for _, middle, low, high in found)


@pytest.mark.parametrize("words", [["pairs=9"], ["pairs=many"], ["pair=20"], ["pairs=20", "more"], ["pairs"]])
def test_too_few_pairs_are_refused(bench_loop, words):
    with pytest.raises(bench_loop.InputError) as told:
        bench_loop.main(words)
    assert str(told.value) == f"{' '.join(words)} is not valid; write pairs=N with N at least 10, one pair a round."


def test_a_refusal_is_a_sentence_and_exit_code_2():
    assert refused("bench_loop.py", "pairs=3").startswith("precision-lab: pairs=3 is not valid; write pairs=N with N ")
    assert refused("bench_sweep.py", "rounds=abc") == "precision-lab: rounds=abc is not valid; write rounds=N.\n"


def test_inspect_ops_prints_no_secret():
    assert refused("inspect_ops.py", f"by={SECRET}") == (
        "precision-lab: by=[redacted] is unknown; valid are operation and module.\n"
    )

"""The scripts that measure and look: they run, and refuse in a sentence."""

import json
import re

import pytest
import torch

from precision_lab.config import ROOT, compose
from precision_lab.errors import InputError
from precision_lab.models import GPT
from typed_scripts import module, run

SECRET = "hunter2-0123456789abcdef"


def refused(script: str, *words: str) -> str:
    done = run(script, *words, SOME_API_KEY=SECRET)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.fixture
def bench_loop():
    """The script as a module, to be run on a model so small that it takes seconds."""
    return module("bench_loop.py")


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


@pytest.fixture
def gpu_figures():
    return module("gpu_figures.py")


def test_the_gpus_workloads_are_what_they_are_said_to_be(gpu_figures):
    resnet, gpt = (compose([f"experiment={name}", "precision=fp32"]) for name in gpu_figures.WORKLOADS)
    assert (resnet.model["name"], resnet.model["image_size"], resnet.device.channels_last) == ("resnet50", 224, True)
    with torch.device("meta"):
        model = GPT(
            vocab_size=256, **{key: gpt.model[key] for key in ("context", "layers", "heads", "width", "dropout")}
        )
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(100e6, rel=0.02)
    for asked in (resnet, gpt):  # the loader has a batch for each step, and some for the validation
        assert asked.trainer.steps > asked.meter.warmup_steps


@pytest.mark.slow
def test_the_gpus_figures_are_gathered_from_what_was_measured(gpu_figures, monkeypatch, tmp_path):
    """On the CPU, with a workload that takes seconds."""
    monkeypatch.setattr(gpu_figures, "WORKLOADS", ("smoke",))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    assert gpu_figures.main([f"into={tmp_path}", "arms=fp32,bf16", "budget_s=1", "device=cpu", "device.threads=1"]) == 0
    (file,) = tmp_path.glob("*.json")
    made = json.loads(file.read_text())
    assert made["hardware"]["device"] == "cpu"
    arms = made["workloads"]["smoke"]["arms"]
    assert set(arms) == {"fp32", "bf16"}
    for arm in arms.values():
        assert (arm["statuses"], arm["kernel_busy_share"], arm["launch_bound"]) == ({"completed": 1}, None, None)
        assert sum(arm["memory"]["by_kind"].values()) == arm["memory"]["peak_bytes"]
        assert arm["step_ms"] > 0
    assert arms["fp32"]["speed_ratio"] is None
    assert arms["bf16"]["speed_ratio"] is None or arms["bf16"]["speed_ratio"]["pairs"] >= 20  # None: no noise floor


@pytest.mark.slow
def test_a_gpu_that_lacks_an_arm_is_told_and_nothing_is_written(gpu_figures, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    with pytest.raises(InputError, match="scripts/benchmark.py ended with exit code 2; nothing was written."):
        gpu_figures.main([f"into={tmp_path / 'results'}", "device=cpu"])
    assert "precision=tf32 needs tf32" in capfd.readouterr().err
    assert not list(tmp_path.iterdir())

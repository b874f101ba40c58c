"""The diagnosis of every net in the zoo: the planted fault named first and healed, nothing found in healthy nets."""

import math
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

import zoo
from precision_lab.config import load_precision
from precision_lab.diagnosis.attribution import RESTORED_DB
from precision_lab.diagnosis.examine import examine
from precision_lab.errors import InputError
from typed_scripts import module, run
from zoo.case import adamw, classify, samples, seeded
from zoo.faults import OnePassNorm

LARGE = ("resnet18", "efficientnet", "mobilenet")  # seconds each, and alike to what remains


def examined(case, model, seed=0):
    return examine(model, case.task, case.batch(seed), load_precision(case.precision), case.target, case.optimizer)


def allowed(units: int) -> float:
    """Passes for so many modules and operations that can be kept."""
    return 8 + 3 * math.log2(units)


@pytest.mark.parametrize("name", zoo.FAULTY)
def test_the_fault_is_named_first_and_healed(name):
    case = zoo.FAULTY[name]
    found = examined(case, case.build(0))
    assert not found.healthy
    assert found.culprits[0] in case.culprit
    if case.cure == "mended":
        found = examined(case, case.mended(0))
        assert (found.healthy, found.culprits) == (True, [])
        found.patient.refine_floor()
        assert found.excess(found.plain) < RESTORED_DB
    else:
        assert found.cure is not None
        assert found.healed.finite
        assert found.excess(found.healed) < RESTORED_DB
    if found.attribution:
        assert found.patient.passes <= allowed(found.attribution.units)


@pytest.mark.parametrize("name", [name for name in zoo.FAULTY if zoo.FAULTY[name].mended])
def test_a_net_written_properly_is_healthy(name):
    case = zoo.FAULTY[name]
    found = examined(case, case.mended(0))
    assert (found.healthy, found.culprits, found.cure) == (True, [], None)


def at_seeds(name: str):
    for seed in (0, 1, 2):
        # a minute on two cores; scripts/zoo.py runs the same
        slow = (pytest.mark.slow,) if seed or name.startswith(LARGE) else ()
        yield pytest.param(name, seed, marks=slow)


@pytest.mark.parametrize(("name", "seed"), [one for name in zoo.HEALTHY for one in at_seeds(name)])
def test_nothing_is_found_in_a_healthy_net(name, seed):
    case = zoo.HEALTHY[name]
    found = examined(case, case.build(seed), seed)
    assert (found.healthy, found.culprits, found.cure) == (True, [], None)
    assert found.patient.passes <= allowed(found.attribution.units)


# --- deep nets ----------------------------------------------------------------------------------------------------


class Shifts(nn.Module):
    """Takes a number far from where low-precision ones are fine, and back."""

    def forward(self, x):
        return (x + 1000) - 1000


class Layer(nn.Module):
    """x + 0.1 linear(relu(norm(x)))"""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x):
        return x + 0.1 * self.linear(torch.relu(self.norm(x)))


def deep(layers: int) -> nn.Sequential:
    make = lambda: nn.Sequential(nn.Linear(16, 16), *(Layer() for _ in range(layers)), nn.Linear(16, 10))  # noqa: E731
    return seeded(0, make)


def diagnosed(net: nn.Module, precision: str = "bf16"):
    return examine(net, classify, samples(16, 16)(0), load_precision(precision), "cuda", adamw)


@pytest.mark.parametrize("layers", [16, 64, 256])
def test_one_fault_takes_no_more_passes_in_a_deep_net(layers):
    net, place = deep(layers), layers // 10
    net[place].linear = nn.Sequential(net[place].linear, Shifts())
    found = diagnosed(net)
    assert found.culprits == [f"{place}.linear.1"]
    assert found.attribution.units >= 3 * layers
    assert found.patient.passes <= 11
    assert found.excess(found.healed) < RESTORED_DB


@pytest.mark.parametrize("layers", [16, 64, 256])
def test_overflows_in_two_places_take_few_passes(layers):
    net = deep(layers)
    places = [layers // 4, layers // 2]
    with torch.no_grad():
        for place in places:
            net[place].linear.weight.mul_(1e7)
            net[place].linear = nn.Sequential(net[place].linear, nn.Tanh())
    found = diagnosed(net, "fp16")
    assert found.culprits == [f"{place}.linear.0" for place in places]
    assert found.patient.passes <= allowed(3 * layers)
    assert found.healed.finite


def test_of_a_residual_stream_the_fault_is_named_and_not_only_the_place_of_its_cure():
    """A module kept early takes the whole stream behind it to float32, and heals what comes after it."""
    net = deep(256)
    with torch.no_grad():
        net[0].bias.add_(6.0)
    net[128].norm = OnePassNorm(16)
    found = diagnosed(net)
    assert found.culprits[0] == "128.norm"
    assert found.excess(found.healed) < RESTORED_DB


# --- the script ---------------------------------------------------------------------------------------------------


@pytest.fixture
def script(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    return module("zoo.py")


def test_what_was_caught_and_let_pass_is_told(script, capsys):
    assert script.main(["log_sum_exp", "normalize_zero_rows", "mlp_fp16"]) == 0
    *lines, _, caught, alarms = capsys.readouterr().out.splitlines()
    names = [("caught", "log_sum_exp"), ("caught", "normalize_zero_rows"), *[("healthy", "mlp_fp16")] * 3]
    assert [tuple(line.split()[:2]) for line in lines] == names
    assert "criterion" in lines[0]
    assert "mended" in lines[1]
    assert caught == "2 of 2 faults caught, 0 missed"
    assert alarms == "0 false alarms in 3 examinations of healthy nets"


def test_a_fault_that_is_not_named_is_missed(script, capsys, monkeypatch):
    monkeypatch.setitem(zoo.FAULTY, "log_sum_exp", replace(zoo.FAULTY["log_sum_exp"], culprit=("net.stem",)))
    assert script.main(["log_sum_exp", "exp_softmax"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("MISSED  log_sum_exp")
    assert "1 of 2 faults caught, 1 missed log_sum_exp" in out


def test_a_fault_that_is_not_healed_is_missed(script, monkeypatch):
    case = zoo.FAULTY["normalize_zero_rows"]
    monkeypatch.setitem(zoo.FAULTY, case.name, replace(case, mended=case.build))
    assert script.main([case.name]) == 1


def test_a_finding_in_a_net_that_is_called_healthy_is_a_false_alarm(script, capsys, monkeypatch):
    monkeypatch.setitem(zoo.HEALTHY, "mlp_fp16", replace(zoo.FAULTY["log_sum_exp"], name="mlp_fp16"))
    assert script.main(["mlp_fp16"]) == 1
    out = capsys.readouterr().out
    assert out.count("ALARM") == 3
    assert "3 false alarms in 3 examinations of healthy nets mlp_fp16 (seed 0) mlp_fp16 (seed 1)" in out


def test_an_unknown_name_is_refused_with_those_there_are(script):
    with pytest.raises(InputError, match="^nope is not in the zoo, which has rewrapped_loss, half_prelu"):
        script.main(["log_sum_exp", "nope"])


def test_the_script_runs_by_itself(tmp_path):
    done = run("zoo.py", "log_sum_exp", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-2:] == [
        "1 of 1 faults caught, 0 missed", "0 false alarms in 0 examinations of healthy nets"
    ]  # fmt: skip
    refused = run("zoo.py", "nope", cwd=tmp_path)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("precision-lab: nope is not in the zoo")

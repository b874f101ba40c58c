"""scripts/diagnose.py: what it says, what it refuses, what it leaves, and the command that it prints."""

import json
import os
import shlex
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import bad_input
from precision_lab import hardware
from precision_lab.assemble import assemble, resolve
from precision_lab.config import ROOT, as_values, compose, load_precision
from precision_lab.diagnosis.examine import examine, overrides
from precision_lab.diagnosis.words import answer, command, lines, markdown
from precision_lab.entry import exit_code
from precision_lab.models import GPT as Net
from precision_lab.probe.memory import cpu_step_peak
from precision_lab.task import LanguageModel
from typed_scripts import module, run
from zoo.case import classify, samples

CPU = ("device=cpu", "device.threads=1")
MLP = (*CPU, "model.hidden=[8]", "steps=2")
MINE = """
import torch, torch.nn.functional as F
from torch import nn

class Net(nn.Module):
    def __init__(self, inner="Fine"):
        super().__init__()
        self.stem, self.inner, self.head = nn.Linear(64, 32), globals()[inner](), nn.Linear(32, 10)
    def forward(self, x):
        return self.head(self.inner(self.stem(x.flatten(1))))

class Fine(nn.Module):
    def forward(self, x):
        return x.relu()

class OneLine(nn.Module):
    def forward(self, x):
        return (x * 300) * (x * 300) / 90_000

class Whole(Net):
    def forward(self, x):
        return self.head(torch.tanh((self.stem(x.flatten(1)) + 3000) - 3000))

class Root(nn.Sequential):
    def __init__(self):
        super().__init__(Whole())

class Noise(nn.Module):
    def __init__(self):
        super().__init__()
        self.own = torch.Generator().manual_seed(0)
    def forward(self, x):
        return x * (1 + 0.01 * torch.randn(x.shape, generator=self.own))

class Inverse(nn.Module):
    def forward(self, x):
        return x @ torch.linalg.inv(torch.eye(32, dtype=x.dtype) + 0.01 * x.T @ x)

class Nothing(nn.Module):
    def forward(self, x):
        return x.flatten(1)[:, :10]

class Breaks(nn.Module):
    def forward(self, x):
        raise ValueError("in any precision")

class OfEach:
    def __call__(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none"), {}

class Secretive(Net):
    def __init__(self, api_key):
        super().__init__("OneLine")
        self.key = api_key
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """The user's own file, in a folder outside the repository; words that name one of its models."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    yield lambda inner: ("model=custom", "model._target_=mine.Net", f"+model.inner={inner}", "steps=2", *CPU)
    sys.modules.pop("mine", None)


@pytest.fixture
def diagnose(tmp_path, capsys):
    """(exit code, stdout, stderr, diagnosis.json or None) of the script in this process."""

    def run_it(*words):
        code = exit_code(lambda: module("diagnose.py").main([*words, f"paths.outputs={tmp_path / 'outputs'}"]))
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        files = sorted(tmp_path.glob("outputs/**/diagnosis.json"))
        return code, out, err, json.loads(files[-1].read_text()) if files else None

    return run_it


# --- refusals -----------------------------------------------------------------------------------------------------

FP16 = ("precision=fp16", "target=cuda")
REFUSED = {
    ("precision=fp32",): "precision=fp32 holds and computes all in float32, by which others are measured; name a",
    ("precision=tf32",): "precision=tf32 holds and computes all in float32",
    ("precision=fp32_perturbed",): "precision=fp32_perturbed holds and computes all in float32",
    (*FP16, "precision.emulate=cuda"): "precision.emulate is for train.py; here target= says whose precision is meant.",
    (*FP16, "device.compile=true"): "A compiled model cannot be taken apart; drop device.compile=true.",
    ("precision=fp16", "target=tpu"): "target=tpu is unknown; valid are cpu, cuda and mps.",
    ("precision=fp16", "target=[cuda]"): "target=['cuda'] is not valid",
    (*FP16, "steps=-1"): "steps=-1 is too small; it must be at least 0.",
    (*FP16, "steps=many"): "steps=many is not valid; it takes a value of type int.",
    (*FP16, "steps=null"): "steps=None is not valid; it takes a value of type int.",
    (*FP16, "budget_s=0"): "budget_s=0.0 must be above 0 and finite: seconds to measure.",
    (*FP16, "budget_s=nan"): "budget_s=nan must be above 0 and finite",
    (*FP16, "budget_s=[1]"): "budget_s=[1] is not valid",
    (*FP16, "checkpoint=/nowhere/at/all"): "checkpoint=/nowhere/at/all is not a file; name a checkpoint",
    (*FP16, "checkpoint=[a]"): "checkpoint=['a'] is not valid",
    (*FP16, "tarket=cuda"): "tarket is not a known key",
    (*FP16, "nope=1"): "nope is not a known key",
    (*FP16, "trainer.batch_size=100000"): "trainer.batch_size=100000 is larger than the training set: choose at most",
    (*FP16, "precision.fp32_modules=[nope]"): "precision.fp32_modules: no module's name matches 'nope'",
    (*FP16, "precision.fp32_ops=[nope]"): "precision.fp32_ops",
    ("precision=fp16", "target=mps", "device=cuda"): "device=cuda is not available here",
}


@pytest.mark.parametrize("words", REFUSED, ids=" ".join)
def test_what_cannot_be_diagnosed_is_refused_in_a_sentence(diagnose, words, tmp_path):
    mlp = [word for word in MLP if word.partition("=")[0] not in {given.partition("=")[0] for given in words}]
    code, out, err, _ = diagnose(*mlp, *words)
    assert (code, out) == (2, "")
    assert err.startswith(f"precision-lab: {REFUSED[words]}")
    assert err.count("\n") == 1
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize("bad", list(bad_input.of_diagnose()), ids=lambda bad: bad.words[0][:30])
def test_made_up_settings_are_refused_in_a_sentence(diagnose, bad):
    code, out, err, _ = diagnose(*FP16, *CPU, *bad.words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"precision-lab: {bad.names[0]}=")
    assert err[:-1].isprintable()
    assert len(err) <= 420


@pytest.mark.skipif(torch.cuda.is_available(), reason="the words are of a machine without CUDA")
def test_a_target_is_emulated_on_a_cpu_alone(diagnose, monkeypatch):
    monkeypatch.setattr(hardware, "select_device", lambda wanted: torch.device("cuda"))
    code, _, err, _ = diagnose("precision=fp16", "target=mps")
    assert code == 2
    assert err == "precision-lab: target=mps is emulated on a CPU, and the device is cuda; set device=cpu.\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("model=custom", "model._target_=mine.Nothing"), "The model has no parameter that requires a gradient"),
        (
            ("model=custom", "model._target_=mine.Net", "+model.inner=Breaks"),
            "The step itself, in float32, raised ValueError: in any precision (",
        ),
        (("task=custom", "task._target_=mine.OfEach"), "task: the loss has shape (64,); it must be a single number."),
    ],
)
def test_a_model_or_task_that_cannot_be_trained_is_told(diagnose, mine, words, sentence):
    code, out, err, _ = diagnose(*FP16, *CPU, *words)
    assert (code, out) == (2, "")
    assert err.startswith(f"precision-lab: {sentence}")
    assert err.count("\n") == 1


def weights_of(path, change=None, *words):
    """A file of an MLP's weights, changed."""
    model = assemble(resolve(compose(["precision=fp32", "device=cpu", "model.hidden=[8]", *words]))).workload.model
    state = model.state_dict()
    if change:
        change(state)
    torch.save(state, path)
    return path


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_checkpoint_of_a_run_that_diverged_is_refused(diagnose, tmp_path, value):
    path = weights_of(tmp_path / "w.pt", lambda state: state["head.weight"].fill_(value))
    code, out, err, _ = diagnose(*FP16, *MLP, f"checkpoint={path}")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "diverged" in err
    assert err.startswith("precision-lab: ")


def test_a_checkpoint_of_another_model_is_refused(diagnose, tmp_path):
    path = weights_of(tmp_path / "w.pt", None, "model.hidden=[16]")
    code, out, err, _ = diagnose(*FP16, *MLP, f"checkpoint={path}")
    assert (code, out) == (2, "")
    assert err.startswith(f"precision-lab: checkpoint={path} is of another model: its layers.0.0.weight is [16,")


def test_a_checkpoint_is_the_weights_that_are_looked_at(diagnose, tmp_path):
    path = weights_of(tmp_path / "it is.pt", lambda state: state["layers.0.0.weight"].mul_(1e6))
    code, out, err, told = diagnose(*FP16, *MLP, f"checkpoint={path}")
    assert (code, err) == (3, "")
    assert told["checkpoint"] == str(path)
    assert told["culprits"][0]["name"] == "layers.0.0"
    (printed,) = [line for line in out.splitlines() if line.startswith("python train.py")]
    assert f"trainer.init_from={path}" in shlex.split(printed)


def test_the_folder_of_a_run_stands_for_its_newest_checkpoint(diagnose, tmp_path):
    run_folder = tmp_path / "run"
    (run_folder / "checkpoints").mkdir(parents=True)
    weights_of(run_folder / "checkpoints" / "step_00000001.pt")
    weights_of(run_folder / "checkpoints" / "step_00000020.pt", lambda state: state["head.weight"].mul_(1e7))
    _, _, _, told = diagnose(*FP16, *MLP, f"checkpoint={run_folder}")
    assert told["checkpoint"] == str(run_folder / "checkpoints" / "step_00000020.pt")
    assert told["culprits"][0]["name"] == "head"


# --- the user's own model -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "says", "override"),
    [
        (
            ["model._target_=mine.Net", "+model.inner=OneLine"],
            "inner: mul in its forward loses",
            "fp32_modules=[inner]",
        ),
        (["model._target_=mine.Root"], "0: sub in its forward has ", "fp32_ops=[add]"),
    ],
)
def test_a_fault_of_the_users_own_is_named_and_the_printed_command_trains_it(tmp_path, model, says, override):
    (tmp_path / "mine.py").write_text(MINE)
    path = f"{ROOT / 'src'}:{tmp_path}"
    words = ["model=custom", *model, "precision=fp16", "target=cuda", *CPU, "steps=3"]
    done = run("diagnose.py", *words, f"paths.outputs={tmp_path / 'my runs'}", cwd=tmp_path, PYTHONPATH=path)
    assert (done.returncode, done.stderr) == (3, "")
    assert f"To blame is {says}" in " ".join(done.stdout.split())
    (printed,) = [line for line in done.stdout.splitlines() if line.startswith("python train.py")]
    assert printed.endswith(f"'precision.{override}'")
    _, script, *typed = shlex.split(printed)
    assert compose(typed).precision == compose(["precision=fp16", f"precision.{override}"]).precision
    environment = os.environ | {"PYTHONPATH": path, "WANDB_MODE": "disabled"}
    command = [sys.executable, str(ROOT / script), *typed, "check=true"]
    checked = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert checked.returncode == 0, checked.stderr
    assert f"fp16[{override.replace('[', '').replace(']', '')}]" in checked.stdout


def test_the_exception_of_a_forward_in_half_is_the_finding(diagnose, mine):
    code, out, err, told = diagnose(*FP16, *mine("Inverse"))
    assert (code, err) == (3, "")
    first = " ".join(out.split("To blame")[0].split())
    assert first == (
        "fp16 on cuda raises where float32 does not, in inner, at linalg_inv_ex: linalg.inv: Low precision dtypes not "
        "supported. Got Half."
    )
    assert told["culprits"][0]["name"] == "inner"
    assert told["cure"]["overrides"] == ["precision.fp32_modules=[inner]"]
    assert [one["arm"] for one in told["proof"]["trained"]] == ["fp32", "fp16[fp32_modules=inner,emulate=cuda]"]


def test_a_model_that_is_not_the_same_twice_is_told_with_the_noise_that_counts(diagnose, mine):
    code, out, err, told = diagnose("precision=fp16", "target=cuda", *mine("Noise"))
    assert (code, err) == (0, "")
    noise = told["figures"]["noise_db"]
    assert 15 < noise < 60
    assert told["figures"]["bound_db"] <= noise
    assert (
        f"This model gives another gradient each time: of two float32 passes one has {noise:.1f} dB SQNR against the "
        "other, and no arm is asked for more."
    ) in " ".join(out.split())


def test_a_healthy_arm_is_no_finding_and_nothing_is_to_be_run(diagnose):
    code, out, err, told = diagnose("precision=bf16", "target=cuda", *MLP)
    assert (code, err) == (0, "")
    assert out.startswith("bf16 on cuda does this step no harm: ")
    assert "python train.py" not in out
    assert (told["healthy"], told["culprits"], told["cure"], told["proof"]) == (True, [], None, None)
    assert told["emulated"] is True


def test_auto_is_what_it_stands_for(diagnose, monkeypatch, mine):
    asked = []
    real = hardware.dtype_support
    monkeypatch.setattr(hardware, "dtype_support", lambda device: asked.append(1) or real(device))
    code, out, _, told = diagnose("precision=auto", *mine("Fine"))
    name = told["arm"]
    assert name in ("bf16", "fp16")
    assert code == 0
    told |= {"cure": {"overrides": ["precision.fp32_modules=[inner]"]}}
    printed = shlex.split(command(told, ["precision=auto"]))[2:]
    assert printed == [f"precision={name}", "precision.fp32_modules=[inner]"]
    assert compose(printed).precision.fp32_modules == ["inner"]


# --- the lesson ---------------------------------------------------------------------------------------------------


def test_the_lesson_is_visibly_worse_named_and_healed(diagnose):
    code, out, _, told = diagnose("experiment=lesson_sensitive", *FP16, *CPU, "steps=20")
    assert code == 3
    assert [one["name"] for one in told["culprits"]] == ["norm"]
    assert told["cure"]["overrides"] == ["precision.fp32_modules=[norm]"]
    losses = {one["arm"]: one["loss"] for one in told["proof"]["trained"]}
    fp32, fp16, healed = losses.values()
    assert fp16 > 1.05 * fp32
    assert healed == pytest.approx(fp32, rel=compose([]).verdict.loss_margin)
    assert all(one["skipped"] == 0 for one in told["proof"]["trained"])  # in silence
    assert "To blame is norm: mul in its forward loses" in " ".join(out.split())
    assert max(map(len, out.splitlines()[:6])) <= 80


# --- words --------------------------------------------------------------------------------------------------------

ROW = {
    "module": "blocks.1.norm", "op": "mul", "phase": "forward", "error": 0.1, "total": 0.1, "sqnr_db": 10.0,
    "nonfinite": 0, "flushed": 0, "amax": 3.0, "lost_at": 4,
}  # fmt: skip
FIGURES = {
    "dtype": "float16", "sqnr_db": 3.25, "floor_db": 61.0, "noise_db": float("inf"), "bound_db": 61.0,
    "excess_db": 57.75, "loss_scale": 65536.0, "loss_fp32": 2.3, "nonfinite": [], "without_gradient": [],
    "raised": None, "raised_in": None, "passes": 11, "units": 29,
}  # fmt: skip
CURE = {
    "arm": "fp16[fp32_modules=blocks.1.norm]", "overrides": ["precision.fp32_modules=[blocks.1.norm]"],
    "sqnr_db": 59.0, "excess_db": 2.0, "loss_scale": 65536.0,
}  # fmt: skip


def trained(arm, loss):
    return {"arm": arm, "loss": loss, "skipped": 0, "saved_activations_mib": 1.0, "saved_weight_casts_mib": 0.5}


PROOF = {
    "steps": 20, "trained": [trained("fp32", 2.09), trained("fp16", 2.305), trained(CURE["arm"], 2.0901)],
    "times": None, "not_timed": "cuda is not here",
}  # fmt: skip


def made_up(figures=None, **changed):
    told = {
        "arm": "fp16", "target": "cuda", "emulated": True, "checkpoint": None, "healthy": False,
        "culprits": [{"name": "blocks.1.norm"} | ROW], "causes": [], "cure": CURE, "updates": None,
        "tried": [{"kept": ["blocks.1.norm"], "excess_db": 2.0}], "local": [ROW], "proof": PROOF,
        "config": {"precision": {"name": "fp16"}},
    }  # fmt: skip
    return told | {"figures": FIGURES | (figures or {})} | changed


CAUSE = {"code": "c", "where": "task", "says": "It is so.", "remedy": "Do it otherwise.", "certain": True}
SAID = {
    "healthy": (
        made_up({"sqnr_db": 60.0, "excess_db": 1.0}, healthy=True, culprits=[], cure=None, proof=None),
        [
            "fp16 on cuda does this step no harm: its gradient has 60.0 dB SQNR against float32's, where float16 alone "
            "allows 61.0 dB on this step; more than 10 dB below that would be a finding.",
            "The largest error that an operation makes by itself is that of mul in blocks.1.norm, forward: 10.0 dB.",
            "Nothing has to be kept in float32.",
        ],
    ),
    "excess": (
        made_up(),
        [
            "fp16 on cuda hurts: its gradient has 3.2 dB SQNR against float32's, where float16 alone allows 61.0 dB on "
            "this step.",
            "To blame is blocks.1.norm: mul in its forward has 10.0 dB SQNR by itself, on inputs that float32 "
            "computed.",
            "With precision.fp32_modules=[blocks.1.norm] the gradient is within 2.0 dB of what the format allows, and "
            "the loss after 20 steps 2.09 with it and 2.305 without, where float32 has 2.09.",
        ],
    ),
    "amplifier": (
        made_up({"sqnr_db": 20.0, "bound_db": 25.0, "excess_db": 5.0}, proof=None),
        [
            "fp16 on cuda hurts in one place: its gradient has 20.0 dB SQNR against float32's, where float16 alone "
            "allows 25.0 dB on this step, and that is so low because of one module.",
            None,
            "With precision.fp32_modules=[blocks.1.norm] the gradient is within 2.0 dB of what the format allows.",
        ],
    ),
    "overflow": (
        made_up(
            {"nonfinite": ["a.b", "c"], "sqnr_db": float("-inf"), "excess_db": float("inf")},
            culprits=[{"name": "a.b"} | ROW | {"module": "a.b", "nonfinite": 2771}],
            cure=CURE | {"excess_db": -1.0},
        ),
        [
            "fp16 on cuda overflows: outputs of a.b and of 1 other module are not finite where float32's are.",
            "To blame is a.b: mul in its forward loses 2,771 values to infinity or NaN on inputs that float32 "
            "computed.",
            "With precision.fp32_modules=[blocks.1.norm] the gradient is no worse than the number format allows, and "
            "the loss after 20 steps 2.09 with it and 2.305 without, where float32 has 2.09.",
        ],
    ),
    "raised": (
        made_up(
            {"raised": "not for Half.", "raised_in": ["a.b", "inv"], "sqnr_db": float("-inf")},
            culprits=[{"name": "a.b"}],
            causes=[CAUSE | {"where": "a.b"}],
            proof=PROOF | {"trained": [trained("fp32", 2.0), trained("healed", 2.0)]},
        ),
        [
            "fp16 on cuda raises where float32 does not, in a.b, at inv: not for Half.",
            "To blame is a.b: It is so.",
            "With precision.fp32_modules=[blocks.1.norm] the gradient is within 2.0 dB of what the format allows, and "
            "the loss after 20 steps 2 with it, where float32 has 2.",
        ],
    ),
    "raised in the task": (
        made_up({"raised": "no", "raised_in": ["", ""]}, culprits=[], cure=None, proof=None),
        [
            "fp16 on cuda raises where float32 does not, in the loss or the model itself: no.",
            "Nothing could be named: no part of the net explains it.",
            "Nothing kept in float32 heals it; train this model in a wider precision.",
        ],
    ),
    "a part without gradient": (
        made_up({"without_gradient": ["a", "b"]}),
        ["fp16 on cuda loses the gradient of 2 parameters, which float32 has.", None, None],
    ),
    "lost updates": (
        made_up(
            arm="bf16_pure",
            updates={"lost": 0.875, "sqnr": 1.0, "sqnr_master": 40.0},
            culprits=[{"name": "precision.param_dtype"}],
            cure=CURE | {"overrides": ["precision.param_dtype=float32", "precision.autocast_dtype=bfloat16"]},
            proof=None,
        ),
        [
            None,
            "To blame is precision.param_dtype: weights in low precision do not take up changes that are small beside "
            "them.",
            "With precision.param_dtype=float32 precision.autocast_dtype=bfloat16 the gradient is within 2.0 dB of "
            "what the format allows.",
        ],
    ),
    "a setting": (
        made_up(
            culprits=[{"name": "precision.grad_scaling"}],
            cure=CURE | {"overrides": ["precision.grad_scaling=true"], "excess_db": 0.0},
            proof=None,
        ),
        [
            None,
            "To blame is precision.grad_scaling: gradients that are too small for float16 are flushed to zero, and a "
            "loss scale saves them.",
            "With precision.grad_scaling=true the gradient is no worse than the number format allows.",
        ],
    ),
    "no gradient": (
        made_up(culprits=[{"name": "task"}], causes=[CAUSE], cure=None, proof=None, tried=[], local=[])
        | {"figures": None},
        [
            "fp16 on cuda cannot train: no parameter receives a gradient, in float32 either.",
            "To blame is task: It is so.",
            "Do it otherwise.",
        ],
    ),
}


@pytest.mark.parametrize("name", SAID)
def test_three_sentences_for_each_kind_of_finding(name):
    told, sentences = SAID[name]
    said = answer(told)
    assert len(said) == 3
    for one, expected in zip(said, sentences, strict=True):
        assert expected in (None, one)
        assert one.endswith(".")
        assert not one.endswith("..")


def test_lost_updates_are_told_by_their_share():
    told, _ = SAID["lost updates"]
    assert "87.5%" in answer(told)[0]
    assert "1.0 dB" in answer(told)[0]


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", SAID)
def test_all_but_the_command_fits_the_width(name, width):
    told, _ = SAID[name]
    words = ["precision=fp16", "model=cnn", f"paths.outputs=/{'long' * 40}"]
    text = lines(told, words, width)
    wide = [line for line in text.splitlines() if len(line) > width]
    assert wide == ([command(told, words)] if told["cure"] else [])
    assert " ".join(answer(told)) in " ".join(text.split())
    page = markdown(told, words)
    assert all(sentence in page for sentence in answer(told))
    assert page.startswith(f"# {told['arm']} on cuda\n")


def test_a_name_that_is_longer_than_a_line_is_folded():
    long = ".".join(f"blocks_{i}" for i in range(20))
    told = made_up(culprits=[{"name": long} | ROW | {"module": long}], local=[ROW | {"module": long}])
    text = lines(told, [], 80)
    assert [line for line in text.splitlines() if len(line) > 80 and not line.startswith("python")] == []
    assert long in "".join(text.split())


def test_what_does_not_restore_because_it_is_not_finite_is_told_so():
    told = made_up(tried=[{"kept": ["a"], "excess_db": float("inf")}, {"kept": ["b"], "excess_db": float("-inf")}])
    text = lines(told, [], 80).splitlines()
    assert "a     not finite" in text
    assert not any("b     not finite" in line for line in text)


NAMES = [
    "norm",
    "0",
    "0.10",
    "blocks.1.ff",
    "a b",
    "it's",
    'say "so"',
    "x{1}",
    "a,b",
    "1e5",
    "größe",
    "-x",
    "a$HOME`b`",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_printed_command_comes_back_as_the_cure(name):
    before = load_precision("fp16")
    after = load_precision("fp16")
    after.fp32_modules, after.fp32_ops = ["stem", name], ["exp"]
    told = made_up(cure=CURE | {"overrides": overrides(before, after)})
    words = ["precision=fp16", "precision.fp32_modules=[stem]", "name=my run"]
    printed = command(told, words)
    assert "\n" not in printed
    typed = subprocess.run(["sh", "-c", f"printf '%s\\n' {printed}"], capture_output=True, text=True, check=True)
    assert typed.stdout.splitlines() == shlex.split(printed)
    assert shlex.split(printed)[:2] == ["python", "train.py"]
    composed = compose(shlex.split(printed)[2:])
    assert composed.precision == after
    assert composed.name == "my run"


def test_settings_come_back_too():
    before, after = load_precision("bf16_pure"), load_precision("bf16_pure")
    mixed = compose(["precision=bf16"]).precision
    after.param_dtype, after.autocast_dtype = mixed.param_dtype, mixed.autocast_dtype
    composed = compose(["precision=bf16_pure", *overrides(before, after)]).precision
    assert (composed.param_dtype, composed.autocast_dtype) == (mixed.param_dtype, mixed.autocast_dtype)
    assert overrides(before, before) == []


# --- what it leaves -----------------------------------------------------------------------------------------------


def test_what_is_written_is_json_and_says_what_was_printed(diagnose, tmp_path):
    code, out, _, told = diagnose("experiment=lesson_sensitive", *FP16, *CPU, "steps=0", "name=my lesson")
    assert code == 3
    (folder,) = tmp_path.glob("outputs/sweeps/my-lesson/diagnoses/*")
    assert out.splitlines()[-1] == f"written: {folder}"
    assert {path.name for path in folder.iterdir()} == {"diagnosis.json", "diagnosis.md"}
    assert "NaN" not in (folder / "diagnosis.json").read_text()
    assert "Infinity" not in (folder / "diagnosis.json").read_text()
    assert (told["schema"], told["arm"], told["target"], told["emulated"]) == (1, "fp16", "cuda", True)
    assert told["proof"] is None
    assert told["figures"]["noise_db"] is None or isinstance(told["figures"]["noise_db"], float | str)
    assert told["config"]["precision"] == as_values(compose(["precision=fp16"]).precision)
    page = (folder / "diagnosis.md").read_text()
    assert "'precision.fp32_modules=[norm]'\n```" in page
    assert out.split("\n\n")[1] in page


@pytest.mark.slow  # two processes, and W&B's own start
def test_its_run_in_wandb_is_read_back_and_no_secret_is_anywhere(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    variable, argument = "hunter2-0123456789abcdef", "correct-horse-battery"
    words = ["model=custom", "model._target_=mine.Secretive", f"+model.api_key={argument}", *FP16, *CPU, "steps=2"]
    words += ["name=${oc.env:MY_API_KEY}", "tags=[${oc.env:MY_API_KEY}]", f"paths.outputs={tmp_path / 'outputs'}"]
    path = f"{ROOT / 'src'}:{tmp_path}"
    done = run("diagnose.py", *words, MY_API_KEY=variable, WANDB_MODE="offline", PYTHONPATH=path)
    assert done.returncode == 3, done.stderr
    (log,) = (tmp_path / "outputs").glob("wandb/offline-run-*/run-*.wandb")
    inspect = [sys.executable, "-m", "wandb", "leet", "inspect", "--summary", "--json", str(log)]
    made = json.loads(subprocess.run(inspect, capture_output=True, text=True, timeout=60, check=True).stdout)
    summary = made["summary"]
    assert summary["diagnosis/healthy"] is False
    assert summary["diagnosis/culprits"] == "inner"
    assert summary["diagnosis/cure"] == "precision.fp32_modules=[inner]"
    assert summary["diagnosis/answer"].startswith("fp16 on cuda ")
    assert summary["diagnosis/passes"] >= 7
    assert b"diagnose" in log.read_bytes()
    files = [one for one in (tmp_path / "outputs").rglob("*") if one.is_file()]
    assert {one.suffix for one in files} >= {".wandb", ".json", ".md"}
    for secret in (variable, argument):
        assert [one.name for one in files if secret.encode() in one.read_bytes()] == [], secret
        assert secret not in done.stdout + done.stderr


# --- cost ---------------------------------------------------------------------------------------------------------

GPT = ("model=gpt", "model.layers=4", "model.width=256", "model.heads=4", "model.context=128", "trainer.batch_size=8")


@pytest.mark.slow  # 6 and 20 s; on one thread, since two wait for each other on a busy machine
@pytest.mark.parametrize("loud", [False, True])
def test_a_gpt_is_diagnosed_in_two_minutes(tmp_path, loud):
    model = Net(64, 128, 4, 4, 256, 0.1)
    if loud:
        with torch.no_grad():
            model.blocks[1].mlp.out.weight.mul_(1e6)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    words = [*GPT, "dataset=synthetic_tokens", "device=cpu", "device.threads=1", f"paths.outputs={tmp_path}", *FP16]
    done = run("diagnose.py", *words, f"checkpoint={tmp_path / 'weights.pt'}", limit_s=400)
    assert done.returncode == (3 if loud else 0), done.stderr
    told = json.loads(next(tmp_path.glob("diagnoses/*/*/diagnosis.json")).read_text())
    assert [one["name"] for one in told["culprits"]] == (["blocks.1.mlp.out"] if loud else [])
    assert (told["proof"] is not None) is loud
    assert told["figures"]["passes"] <= 12
    assert told["seconds"] < 120


def peaks(model, task, batch, precision):
    """Bytes at the peak of a training step and of an examination; and what that found."""
    build = lambda m: torch.optim.AdamW(m.parameters(), fused=True)  # noqa: E731
    optimizer, found = build(model), []

    def step():
        task(model, batch)[0].backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    alive = [*model.parameters(), *model.buffers(), *tree_leaves(batch)]
    state = [value for one in optimizer.state.values() for value in one.values()]
    training = cpu_step_peak(step, [*alive, *state]).nbytes
    look = lambda: found.append(examine(model, task, batch, load_precision(precision), "cuda", build))  # noqa: E731
    return training, cpu_step_peak(look, alive).nbytes, found[0]


@pytest.mark.parametrize("loud", [False, True])
def test_an_examination_takes_no_more_than_three_times_the_memory_of_training(loud):
    layers = [nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256), nn.Linear(256, 10)]
    model = nn.Sequential(*layers)
    if loud:
        nn.init.constant_(model[2].weight, 1e7)
    training, looking, found = peaks(model, classify, samples(512, 64)(0), "fp16")
    assert looking <= 3 * training
    assert found.culprits[:1] == (["2"] if loud else [])


@pytest.mark.slow  # the allocator's events of whole examinations: half a minute each
@pytest.mark.parametrize("loud", [False, True])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_gpt_is_examined_in_three_times_the_memory_of_its_training(precision, loud):
    model, tokens = Net(256, 128, 4, 4, 256, 0.1), torch.randint(256, (8, 129))
    if loud:
        with torch.no_grad():
            model.blocks[1].mlp.out.weight.mul_(1e7)
    training, looking, found = peaks(model, LanguageModel(), tokens, precision)
    assert looking <= 3 * training
    assert found.culprits == (["blocks.1.mlp.out"] if loud and precision == "fp16" else [])

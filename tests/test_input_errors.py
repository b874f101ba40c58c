"""Wrong input through the command line itself: exit 2, one sentence, no folder, and no torch where it can be helped.

Each case runs train.py in a process of its own with a `torch` first on its path that records being
imported. The cases that need torch run train.py as __main__ inside this process.
"""

import inspect
import json
import os
import re
import runpy
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch

import bad_input
from precision_lab import arguments
from precision_lab.config import ROOT, compose
from precision_lab.errors import InputError

TRAIN = ROOT / "train.py"
PRECISIONS = "auto, bf16, bf16_pure, fp16, fp16_unscaled, fp32, fp32_perturbed, tf32"
TRAINER_KEYS = ("steps", "epochs", "batch_size", "accumulation", "grad_clip", "log_every", "eval_every", "workers")

FAKE_TORCH = """
import os, pathlib
pathlib.Path(os.environ["TORCH_WAS_IMPORTED"]).touch()
raise ImportError("this torch is a fake")
"""

# Runs train.py as __main__ in a fork for each line it reads: a fresh process without the 0.3 s that loading
# Hydra takes. `test_a_fork_answers_as_python_does` holds it to what `python train.py` does.
FORKS = """
import json, os, runpy, sys, traceback
import hydra._internal.config_loader_impl, hydra._internal.hydra, omegaconf, precision_lab.config, rich

def child(case):
    os.chdir(case["cwd"])
    os.environ.update(case["env"])
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(case[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.argv, sys.path[0] = case["argv"], os.path.dirname(case["argv"][0])
    try:
        runpy.run_path(case["argv"][0], run_name="__main__")
        return 0
    except SystemExit as end:
        return end.code or 0
    except BaseException:
        traceback.print_exc()
        return 1

for line in sys.stdin:
    pid = os.fork()
    if not pid:
        code = child(json.loads(line))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@dataclass
class Answer:
    code: int
    out: str
    err: str
    torch_imported: bool
    left_behind: list[str]


@pytest.fixture(scope="module")
def surroundings(tmp_path_factory):
    """An environment in which `torch` is the fake one, and the file by which it tells."""
    folder = tmp_path_factory.mktemp("surroundings")
    fake = folder / "fake" / "torch"
    fake.mkdir(parents=True)
    (fake / "__init__.py").write_text(FAKE_TORCH)
    marker = folder / "torch_was_imported"
    path = os.pathsep.join([str(fake.parent), str(ROOT / "src")])
    return os.environ | {"PYTHONPATH": path, "TORCH_WAS_IMPORTED": str(marker), "WANDB_MODE": "disabled"}, marker


@pytest.fixture(scope="module")
def forks(surroundings):
    environment, _ = surroundings
    process = subprocess.Popen(
        [sys.executable, "-c", FORKS], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    yield process
    process.stdin.close()
    process.stdout.close()
    assert process.wait(timeout=10) == 0


def observe(tmp_path, surroundings, start):
    """A function from words of the command line to what came of them. Every output path lies in an empty folder."""
    here = tmp_path / "here"
    here.mkdir(exist_ok=True)
    marker = surroundings[1]

    def run(*words: str, outputs: bool = True, **environment: str) -> Answer:
        marker.unlink(missing_ok=True)
        asked = [*words, *([f"paths.outputs={here}/outputs"] if outputs else [])]
        code, out, err = start([str(TRAIN), *asked], here, environment)
        left = sorted(str(p.relative_to(here)) for p in here.rglob("*"))
        return Answer(code, out, err, marker.exists(), left)

    return run


@pytest.fixture
def train(tmp_path, surroundings, forks):
    """Run train.py in a fork."""

    def start(argv, cwd, environment):
        files = {name: str(tmp_path / name) for name in ("out", "err")}
        case = {"argv": argv, "cwd": str(cwd), "env": environment, **files}
        forks.stdin.write(json.dumps(case) + "\n")
        forks.stdin.flush()
        code = int(forks.stdout.readline())
        return code, *(Path(path).read_text() for path in files.values())

    return observe(tmp_path, surroundings, start)


@pytest.fixture
def python_train(tmp_path, surroundings):
    """Run `python train.py` itself."""

    def start(argv, cwd, environment):
        done = subprocess.run(
            [sys.executable, *argv],
            cwd=cwd,
            env=surroundings[0] | environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.returncode, done.stdout, done.stderr

    return observe(tmp_path, surroundings, start)


def assert_one_sentence(err: str) -> str:
    """One line of one or two sentences; returns it without the program's name."""
    assert "Traceback" not in err
    assert not re.search(r"\w(Exception|Error)\b", err), err  # a class name is no sentence
    assert err.startswith("precision-lab: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1, err
    sentence = err.removeprefix("precision-lab: ").rstrip("\n")
    assert sentence.endswith(".")
    assert 1 <= len(re.findall(r"[.?](?= [A-Z]|$)", sentence)) <= 3  # a hint's question mark is no sentence
    return sentence


def assert_refused_without_torch(answer: Answer) -> str:
    assert answer.code == 2, answer.err[-600:]
    assert answer.out == ""
    sentence = assert_one_sentence(answer.err)
    assert not answer.torch_imported
    assert answer.left_behind == []
    return sentence


@pytest.mark.parametrize("way", ["train", "python_train"])
def test_right_input_does_import_torch(request, way):
    """The control: were torch imported, the tests here would see it."""
    answer = request.getfixturevalue(way)("precision=fp32")
    assert answer.torch_imported
    assert "this torch is a fake" in answer.err


ADD = "if {0}._target_ takes it, write +{0}.{1}=VALUE."
# words of the command line -> what the one sentence must hold: the key, and what is valid
CASES = {
    # unknown choice
    "precision=bf61": ("precision=bf61 does not exist; did you mean bf16?", f"Valid are {PRECISIONS}."),
    "model=resnet": (
        "model=resnet does not exist",
        "cnn, custom, gpt, loud_mlp, mlp, resnet18, resnet50, torchvision, vit_b_16.",
    ),
    "device=tpu": ("device=tpu does not exist", "auto, cpu, cuda, mps."),
    "experiment=nope": ("experiment=nope does not exist", "lesson, lesson_sensitive, smoke."),
    "modl=cnn": ("modl is not a known", "did you mean model?", "optimizer", "trainer"),
    # unknown key
    "trainer.stepz=5": ("trainer.stepz is not a known key; did you mean steps?", *TRAINER_KEYS),
    "trainer.learning_rate=1": ("trainer.learning_rate is not a known key", *TRAINER_KEYS),
    "+precision.foo=1": ("precision.foo is not a known key", "autocast_dtype", "fp32_modules"),
    "+foo=1": ("foo is not a known key", "seed", "trainer"),
    "optimizer.nope=1": ("optimizer.nope is not a known key", ADD.format("optimizer", "nope")),
    "hydra.foo=1": ("hydra.foo is not a key of Hydra's; `python train.py --cfg hydra` lists them.",),
    "hydra.sweep.foo=1": ("hydra.sweep.foo is not a key of Hydra's",),
    # wrong type or value
    "meter.warmup_steps=null": ("meter.warmup_steps cannot be null.",),
    "tags=null": ("tags cannot be null.",),
    "hydra.run.dir=null": ("hydra.run.dir cannot be null.",),
    "name=[1]": ("name=[1] is not valid; it must be text.",),
    "precision.autocast_dtype=[a]": ("precision.autocast_dtype=['a'] is not valid; valid are float32, bfloat16",),
    "trainer.steps=many": ("trainer.steps=many is not valid; it must be a whole number.",),
    "trainer.steps=1.5": ("trainer.steps=1.5 is not valid; it must be a whole number.",),
    "trainer.steps=": ("trainer.steps= is not valid; it must be a whole number.",),
    "trainer.grad_clip=much": ("trainer.grad_clip=much is not valid; it must be a number.",),
    "check=maybe": ("check=maybe is not valid; it must be true or false.",),
    "precision.autocast_dtype=float8": (
        "precision.autocast_dtype=float8 is not valid; valid are float32, bfloat16, float16.",
    ),
    "precision.fp32_modules=head": ("precision.fp32_modules", "list"),
    "wandb.mode=ofline": ("wandb.mode=ofline is not valid; valid are online, offline, disabled.",),
    "on_error=ignore": ("on_error=ignore is not valid; valid are continue, stop.",),
    "on_unsupported=go": ("on_unsupported=go is not valid; valid are stop, skip.",),
    "rerun=some": ("rerun=some is not valid; valid are never, failed, all.",),
    "precision=fp16 precision.name=xyz": ("precision.name=xyz", "precision/xyz.yaml"),
    # out of range
    "trainer.steps=-1": ("trainer.steps=-1 is too small; it must be at least 1.",),
    "trainer.batch_size=0": ("trainer.batch_size=0 is too small; it must be at least 1.",),
    "device.memory_budget_gib=1e308": ("device.memory_budget_gib=1e+308 is too large; it must be at most 1048576",),
    "model=gpt dataset=stdlib_text model.layers=1000000000": ("it must be a whole number from 1 to 10000.",),
    "trainer.workers=1000": ("trainer.workers=1000 is too large; it must be at most 256.",),
    "seed=-1": ("seed=-1 is out of range; it must be from 0 to 4294967295.",),
    "optimizer.lr=abc": ("optimizer.lr=abc must be a finite number above 0.",),
    "optimizer.lr=nan": ("optimizer.lr=nan must be a finite number above 0.",),
    # what does not go together
    "trainer.steps=5 trainer.epochs=1": (
        "Exactly one of trainer.steps and trainer.epochs must be set; set the other to null: trainer.steps=null "
        "trainer.epochs=1.",
    ),
    "experiment=lesson trainer.steps=10": ("Exactly one of trainer.steps and trainer.epochs must be set; set the oth",),
    "model=cnn dataset=synthetic_tokens": ("model=cnn works on images", "dataset=synthetic_tokens works on tokens"),
    "precision=bf16 precision.grad_scaling=true": (
        "precision.grad_scaling=true needs precision.autocast_dtype=float16",
    ),
    "precision=auto precision.min_scale=2": ("precision=auto takes no further precision settings",),
    "precision=bf16 precision.emulate=xpu": ("precision.emulate=xpu is not valid; valid are cpu, cuda, mps.",),
    "precision=fp32 precision.emulate=cuda": (
        "precision.emulate=cuda carries out another device's low precision, and precision=fp32 has none; use bf16 or",
    ),
    "precision=fp16 precision.emulate=cuda device=cuda": (
        "precision.emulate needs the CPU, which carries out what cuda would do; set device=cpu.",
    ),
    "precision=fp16 precision.emulate=cuda device.compile=true": (
        "precision.emulate and device.compile=true cannot be combined",
    ),
    "precision=bf16 precision.fp32_ops=[exp] device.compile=true": (
        "precision.fp32_ops and device.compile=true cannot be combined",
    ),
    "precision=fp32 precision.fp32_ops=[exp]": ("precision.fp32_ops", "precision.autocast_dtype is null"),
    "precision=fp32 precision.fp32_modules=[head]": ("precision.fp32_modules", "precision.autocast_dtype is null"),
    "model=custom": ("model._target_", "write model=custom model._target_=module.Name."),
    # one job of a sweep
    "-m precision=fp32,bf61": ("precision=bf61 does not exist; did you mean bf16?",),
    "-m seed=0,-1": ("seed=-1 is out of range; it must be from 0 to 4294967295.",),
    "-m trainer.stepz=1,2": ("trainer.stepz is not a known key; did you mean steps?", *TRAINER_KEYS),
    "-m optimizer.lr=0.1,abc": ("optimizer.lr=abc must be a finite number above 0.",),
    "-m model=mlp,cnn dataset=synthetic_tokens": ("model=mlp works on images",),
    "-m rerun=some seed=0,1": ("rerun=some is not valid; valid are never, failed, all.",),
    "-m name=${nowhere} seed=0,1": ("nowhere", "name"),
    "-m hydra/launcher=nope seed=0,1": ("hydra/launcher=nope does not exist", "isolated"),
    "-m hydra/launcher=basic seed=0,1": ("hydra/launcher=basic runs all jobs in one process", "isolated"),
    # files
    "dataset=image_folder dataset.root=/nowhere": ("dataset.root=/nowhere is not a folder",),
    "dataset=cifar10 dataset.root=/nowhere": ("CIFAR10 is not in dataset.root=/nowhere", "dataset.download=true"),
    "model=gpt dataset=text_file dataset.path=/nowhere": ("dataset.path=/nowhere is not a file",),
    "model=gpt dataset=text_file dataset.path=5": ("dataset.path=5 is not a file",),
    "dataset=image_folder dataset.root=5": ("dataset.root=5 is not a folder",),
    "dataset=image_folder": ("dataset.root=None is not a folder; it must hold one folder of images a class.",),
    "model=gpt dataset=text_file": ("dataset.path=None is not a file; name a text file.",),
    "dataset=cifar10 dataset.name=SVHN": ("dataset.name=SVHN is unknown; valid are MNIST, FashionMNIST, CIFAR10",),
    "dataset=cifar10 dataset.name=[a]": ("dataset.name=['a'] is unknown; valid are MNIST",),
    # sizes
    "model.num_classes=0": ("model.num_classes=0 is not valid; it must be a whole number of at least 1, or null.",),
    "dataset.channels=0": ("dataset.channels=0 is not valid",),
    "dataset.image_size=-8": ("dataset.image_size=-8 is not valid",),
    "dataset.image_size=large": ("dataset.image_size=large is not valid",),
    "model.channels=1.5": ("model.channels=1.5 is not valid",),
    "model.channels=true": ("model.channels=True is not valid",),
    # arguments of what is shipped
    "+model.depth=3": (
        "model.depth is not an argument of precision_lab.models.MLP",
        "num_classes, channels, image_size",
    ),
    "model.hidden=abc": ("model.hidden=abc is not valid", "a list of whole numbers of at least 1, such as [64,64]."),
    "~model.hidden": ("model.hidden has no value, and precision_lab.models.MLP needs one",),
    "model=gpt dataset=synthetic_tokens model.heads=0": ("model.heads=0 is not valid", "a whole number of at least 1."),
    "model=gpt dataset=synthetic_tokens model.heads=3": ("model.width=128 is not a multiple of model.heads=3.",),
    "model=gpt dataset=stdlib_text dataset.max_bytes=99": (
        "dataset.max_bytes=99",
        "dataset.val_fraction=0.1",
        "context",
    ),
    "model=gpt model.context=null dataset=synthetic_tokens": ("dataset.context and model.context are both null",),
    "optimizer.betas=abc": ("optimizer.betas=abc is not valid; it must be a pair of numbers",),
    "task.label_smoothing=1.5": ("task.label_smoothing=1.5 is not valid; it must be a number from 0 to 1.",),
    "task.label_smoothing=-0.1": ("task.label_smoothing=-0.1 is not valid",),
    "task.label_smoothing=some": ("task.label_smoothing=some is not valid",),
    "task.label_smoothing=nan": ("task.label_smoothing=nan is not valid",),
    # Hydra's grammar and interpolation
    "name=${nowhere}": ("nowhere", "name"),
    "name=${oc.env:NO_SUCH_VARIABLE}": ("NO_SUCH_VARIABLE", "name"),
    "precision=fp32,bf16": ("precision=fp32,bf16", "add -m"),
    "precision=null": ("precision",),
    f"model={'0' * 3000}x": ("does not exist; valid are",),
    f"precision=fp32 precision.name={'0' * 3000}x": ("precision.name=000",),
    f"model={'x' * 3000}/y": ("does not exist; valid are",),
    "trainer=1 seed=0": ("trainer=1: a config group takes the name of one of its choices.",),
    "model=null seed=0": ("model=null: a config group takes the name of one of its choices.",),
    "precision=bf16 -m seed=0,1": ("-m goes first: python train.py -m seed=0,1",),
    "-m seed=0,1 --precision=bf16": ("unrecognized arguments: --precision=bf16", "Overrides are written key=value"),
    "model=custom model._target_=mine.Net +model.context=abc dataset=stdlib_text": (
        "model.context=abc is not valid; it must be a whole number of at least 1.",
    ),
    "~seed": ("seed has no value; every key of the configuration needs one.",),
    "--precision=bf16": ("unrecognized arguments: --precision=bf16. Overrides are written key=value",),
    # sweeps that are none
    "-m seed=range(1e9)": ("The sweep has 1,000,000,000 jobs; at most 10,000 are taken.",),
    "-m seed=range(0,5,0)": ("seed=range(0,5,0) has no end",),
    "-m seed=interval(0,1)": ("seed=interval(0,1) lists no values",),
    "~precision": ("precision has no value",),
}


@pytest.mark.parametrize("words", CASES)
def test_wrong_input_is_one_sentence_without_torch(train, words):
    sentence = assert_refused_without_torch(train(*words.split(" ")))
    for part in CASES[words]:
        assert part in sentence


BY_PYTHON = [
    *("precision=bf61", "trainer.stepz=5", "trainer.steps=many", "trainer.steps=-1", "optimizer.lr=abc", "seed=-1"),
    *("model=cnn dataset=synthetic_tokens", "precision=bf16 precision.grad_scaling=true"),
    *("dataset=image_folder dataset.root=/nowhere", "dataset=cifar10 dataset.root=/nowhere", "name=${nowhere}"),
]


@pytest.mark.parametrize("words", BY_PYTHON)
def test_python_train_py_refuses_it_too(python_train, words):
    sentence = assert_refused_without_torch(python_train(*words.split(" ")))
    for part in CASES[words]:
        assert part in sentence


@pytest.mark.parametrize("words", ["trainer.batch_size=0", "modl=cnn", "name=a=b"])
def test_a_fork_answers_as_python_does(train, python_train, words):
    assert train(words) == python_train(words)


@pytest.mark.parametrize("word", ["a b", "name='abc", "tags=[a", "name=a=b", "=3"])
def test_what_hydra_cannot_parse_is_quoted(train, word):
    assert word in assert_refused_without_torch(train(word))


def test_no_input_error_needs_the_outputs_folder(train):
    """Without paths.outputs of ours, nothing appears in the working folder either."""
    answer = train("trainer.steps=-1", outputs=False)
    assert assert_refused_without_torch(answer) == "trainer.steps=-1 is too small; it must be at least 1."


def test_the_environment_variable_of_wandb_is_checked(train):
    sentence = assert_refused_without_torch(train(WANDB_MODE="ofline"))
    assert sentence == "wandb.mode=ofline is not valid; valid are online, offline, disabled."


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("trainer: {stepz: 5}", ("trainer.stepz is not a known key; did you mean steps?", *TRAINER_KEYS)),
        ("trainr: {steps: 5}", ("trainr is not a known key; did you mean trainer?",)),
        ("precision: {foo: 5}", ("precision.foo is not a known key", "autocast_dtype")),
        ("trainer: {steps: many}", ("trainer.steps=many is not valid; it must be a whole number.",)),
        ("wandb: {mode: ofline}", ("wandb.mode=ofline is not valid; valid are online, offline, disabled.",)),
        ("trainer: {steps: -1}", ("trainer.steps=-1 is too small; it must be at least 1.",)),
        ("trainer: {steps: null}", ("Exactly one of trainer.steps and trainer.epochs must be set",)),
        ("defaults: [override /model: resnet]", ("model=resnet does not exist", "resnet18, resnet50")),
        ("trainer: {steps: 5", ("mine.yaml",)),
    ],
)
def test_a_wrong_experiment_file(train, tmp_path, content, parts):
    mine = tmp_path / "conf" / "experiment" / "mine.yaml"
    mine.parent.mkdir(parents=True)
    mine.write_text(f"# @package _global_\n{content}\n")
    sentence = assert_refused_without_torch(train("--config-dir", str(tmp_path / "conf"), "experiment=mine"))
    for part in parts:
        assert part in sentence


# --- whatever comes --------------------------------------------------------------------------


def assert_refused_at_once(bad: bad_input.Bad, answer: Answer) -> None:
    sentence = assert_refused_without_torch(answer)
    assert len(answer.err) <= 420
    assert sentence.isprintable()
    assert any(name in sentence for name in bad.names), (bad.names, sentence)


@pytest.mark.parametrize("bad", bad_input.chosen(60), ids=lambda bad: f"{bad.kind}: {' '.join(bad.words)[:40]}")
def test_a_sample_of_made_up_input_is_refused_in_a_sentence(train, bad):
    own_outputs = any("paths." in word for word in bad.words)
    assert_refused_at_once(bad, train(*bad.words, outputs=not own_outputs))


@pytest.mark.slow
def test_500_made_up_inputs_are_refused_in_a_sentence_at_once(surroundings, tmp_path):
    """Each in a process of its own, two at a time. Its CPU seconds count, not those that it waits for a CPU."""
    cases, wrong = bad_input.chosen(500, seed=1), []

    def refused(number: int) -> float:
        bad, here = cases[number], tmp_path / str(number)
        here.mkdir()
        own_outputs = any("paths." in word for word in bad.words)
        words = [*bad.words, *([] if own_outputs else [f"paths.outputs={here}/outputs"])]
        environment = surroundings[0] | {"TORCH_WAS_IMPORTED": str(here / "torch_was_imported")}
        with (tmp_path / f"{number}.err").open("w+b") as err, (tmp_path / f"{number}.out").open("w+b") as out:
            command = [sys.executable, str(TRAIN), *words]
            process = subprocess.Popen(command, cwd=here, env=environment, stdout=out, stderr=err)
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            texts = [(file.seek(0), file.read().decode())[1] for file in (out, err)]
        left = sorted(path.name for path in here.iterdir())
        try:
            assert_refused_at_once(bad, Answer(process.returncode, *texts, "torch_was_imported" in left, left))
        except AssertionError as error:
            wrong.append((bad.kind, [word[:60] for word in words], str(error)[:500]))
        return used.ru_utime + used.ru_stime

    with ThreadPoolExecutor(2) as two:
        seconds = sorted(two.map(refused, range(len(cases))))
    print(f"{len(seconds)} refused; CPU seconds: median {statistics.median(seconds):.2f}, most {seconds[-1]:.2f}")
    assert not wrong, "\n".join(map(str, wrong))
    assert len(seconds) == 500
    assert seconds[-1] < 1.5


def test_what_is_shipped_takes_what_the_table_says():
    for target, table in {**arguments.SHIPPED, **arguments.TORCHS}.items():
        taken = inspect.signature(resolve_name(target)).parameters
        names = {name for name in table if name is not ...}
        given_by_us = {"step", "total_steps", "params"}
        rest = [name for name, one in taken.items() if one.kind is one.VAR_KEYWORD]
        assert names <= set(taken) | ({"channels"} if rest else set()), target
        if ... not in table:
            assert names == set(taken) - given_by_us, target
            needed = {name for name, one in taken.items() if one.default is one.empty} - given_by_us
            assert {name for name in names if table[name].required} == needed, target


# --- what only torch can tell ---------------------------------------------------------------


@pytest.fixture
def train_here(tmp_path, monkeypatch, capfd):
    """Run train.py as __main__ in this process, where torch is loaded already."""

    def run(*words: str) -> Answer:
        monkeypatch.setattr(sys, "argv", [str(TRAIN), *words, f"paths.outputs={tmp_path}/outputs"])
        monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
        monkeypatch.chdir(tmp_path)
        with pytest.raises(SystemExit) as left:
            runpy.run_path(str(TRAIN), run_name="__main__")
        out, err = capfd.readouterr()
        return Answer(left.value.code, out, err, True, sorted(p.name for p in tmp_path.iterdir()))

    return run


NEEDING_TORCH = {
    "precision=tf32 device=cpu": ("precision=tf32 needs tf32, which this cpu device does not have", "bfloat16"),
    "model=custom model._target_=torch.nn.NoSuchThing": ("model._target_=torch.nn.NoSuchThing cannot be loaded",),
    "model=custom model._target_=no_such_module.Net": ("no_such_module", "PYTHONPATH"),
    "dataset=custom dataset._target_=no_such_module.data": ("dataset._target_=no_such_module.data cannot be loaded",),
    "task=custom task._target_=no_such_module.task": ("task._target_=no_such_module.task cannot be loaded",),
    "scheduler=custom scheduler._target_=no.such.schedule": ("scheduler._target_=no.such.schedule cannot be loaded",),
    "model=custom model._target_=torch.nn.Linear +model.wrong=3": ("model: torch.nn.Linear refused its arguments",),
    "model=custom model._target_=builtins.dict": ("model._target_=builtins.dict built dict, not an nn.Module",),
    "model=torchvision model.name=resnet18x": ("model.name=resnet18x is not one of torchvision's", "resnet18"),
    "optimizer=custom optimizer._target_=torch.optim.Nope": ("optimizer._target_=torch.optim.Nope cannot be loaded",),
    "+optimizer.nope=1": ("optimizer: torch.optim.AdamW refused its arguments", "nope"),
    "optimizer=custom optimizer._target_=own_code.mine.no_optimizer": (
        "optimizer._target_=own_code.mine.no_optimizer built NoneType, not a torch optimizer.",
    ),
    "optimizer=custom optimizer._target_=own_code.mine.no_optimizer +optimizer.several=true": ("built list, not a",),
    "task=custom task._target_=own_code.mine.NotCalled": ("task._target_=own_code.mine.NotCalled is a class without",),
    "precision=bf16 precision.fp32_modules=[nope]": (
        "precision.fp32_modules: no module's name matches 'nope'; this model has layers, layers.0",
    ),
    "precision=bf16 precision.fp32_modules=[layer.0]": (
        "precision.fp32_modules: no module's name matches 'layer.0'; near are layers.0, ",
    ),
    "precision=bf16 precision.fp32_ops=[sofmax]": (
        "precision.fp32_ops: 'sofmax' is no operation of torch's that returns a new tensor; near are softmax, ",
    ),
    "precision=bf16 precision.fp32_ops=[softmax] check=true": (
        "precision.fp32_ops: softmax is never called under autocast by this model and task.",
    ),
    "trainer.batch_size=5000": ("trainer.batch_size=5000 is larger than the training set: choose at most 1438.",),
    "model=gpt dataset=stdlib_text dataset.context=256": ("model.context=128 and dataset.context=256 differ",),
}


@pytest.mark.parametrize("words", NEEDING_TORCH)
def test_what_torch_must_be_asked_for_is_one_sentence_too(train_here, words):
    answer = train_here(*words.split(" "))
    assert answer.code == 2, answer.err
    sentence = assert_one_sentence(answer.err)
    for part in NEEDING_TORCH[words]:
        assert part in sentence
    assert answer.left_behind == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_device_that_is_not_here(train_here):
    answer = train_here("device=cuda")
    assert answer.code == 2
    assert assert_one_sentence(answer.err) == "device=cuda is not available here; this machine has cpu."
    assert answer.left_behind == []


def test_check_leaves_nothing(train_here):
    answer = train_here("check=true", "precision=fp32", "device=cpu")
    assert answer.code == 0
    assert answer.err == ""
    assert "the input is right" in answer.out
    assert answer.left_behind == []


# --- how fast --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("words", ["trainer.stepz=5", "precision=bf61", "seed=-1", "--help", "--cfg job"])
def test_the_answer_takes_less_than_a_second_and_a_half(python_train, words):
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        answer = python_train(*words.split(" "), outputs=False)
        seconds.append(time.perf_counter() - start)
        assert answer.code == (0 if words.startswith("--") else 2)
        assert not answer.torch_imported
        assert answer.left_behind == []
    assert statistics.median(seconds) < 1.5


@pytest.mark.parametrize("words", ["--help", "--cfg job"])
def test_help_and_the_composed_config_need_no_torch(python_train, words):
    answer = python_train(*words.split(" "), outputs=False)
    assert (answer.code, answer.err, answer.torch_imported, answer.left_behind) == (0, "", False, [])
    assert "max_consecutive_skips: 50" in answer.out
    if words == "--help":
        assert f"precision: {PRECISIONS}" in answer.out


def test_the_repository_gained_no_hydra_folder():
    assert not Path(ROOT, ".hydra").exists()
    assert not Path(ROOT, "multirun").exists()


@pytest.mark.parametrize(
    ("word", "said"),
    [
        (
            "wandb.extras=[foo]",
            "wandb.extras[0]=foo is not valid; valid are memory, op_map, config, checkpoint, alert.",
        ),
        ("wandb.extras=memory", "it must be a list, such as wandb.extras=[memory,op_map,config,checkpoint,alert]."),
        ("tags=night", "tags is not valid; it must be a list, such as tags=[a,b]."),
    ],
)
def test_a_list_of_words_tells_its_words(word, said):
    with pytest.raises(InputError) as refused:
        compose([word])
    assert str(refused.value).endswith(said)


def test_an_op_map_of_a_compiled_model_is_refused():
    with pytest.raises(InputError, match=r"wandb.extras=\[op_map\] looks at modules one by one"):
        compose(["wandb.extras=[op_map]", "device.compile=true"])

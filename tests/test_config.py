"""conf/ and its schemas: every file composes, every default stands in YAML, every invariant has its sentence."""

import copy
import inspect
import math
import os
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.utils import get_object
from omegaconf import MISSING, OmegaConf, open_dict

from precision_lab import config, hardware, open_sets
from precision_lab.arm_schema import Dtype, Float32Mode
from precision_lab.assemble import build_workload
from precision_lab.batches import TrainBatches, place_on
from precision_lab.config import (
    CONF,
    Config,
    DeviceConfig,
    as_values,
    compose,
    load_precision,
)
from precision_lab.errors import InputError
from precision_lab.folders import sweep_folder
from precision_lab.optim import build_optimizer
from precision_lab.precision import Policy
from precision_lab.recorder import METRICS
from precision_lab.trainer import Trainer

FILES = sorted(path.relative_to(CONF) for path in CONF.rglob("*.yaml"))
NO_GROUPS = (".", "wandb_sweep")  # files that Hydra composes nothing from by a group's name
CHOICES = [(path.parent.as_posix(), path.stem) for path in FILES if path.parent.as_posix() not in NO_GROUPS]
PRECISIONS = [choice for group, choice in CHOICES if group == "precision"]

# What a choice cannot be composed without: a partner of its kind, or a value that its file leaves to the user.
NEEDS = {
    ("model", "gpt"): ["dataset=synthetic_tokens"],
    ("model", "custom"): ["model._target_=torch.nn.Identity"],
    ("dataset", "custom"): ["dataset._target_=builtins.list"],
    ("dataset", "stdlib_text"): ["model=gpt"],
    ("dataset", "synthetic_tokens"): ["model=gpt"],
    ("dataset", "text_file"): ["model=gpt", f"dataset.path={__file__}"],
    ("dataset", "image_folder"): [f"dataset.root={CONF}", "dataset.image_size=8"],
    ("dataset", "torchvision"): ["dataset.download=true"],
    ("dataset", "cifar10"): ["dataset.download=true"],
    ("dataset", "mnist"): ["dataset.download=true"],
    ("task", "custom"): ["task._target_=builtins.list"],
    ("task", "language_model"): ["model=gpt", "dataset=synthetic_tokens"],
    ("optimizer", "custom"): ["optimizer._target_=torch.optim.RMSprop"],
    ("scheduler", "custom"): ["scheduler._target_=builtins.max"],
}


def stated(path) -> dict:
    """The leaves a YAML file states, by dotted key, without its defaults list."""
    values = yaml.safe_load((CONF / path).read_text()) or {}
    return {key: value for key, value in leaves(values) if not key.startswith("defaults")}


def leaves(values, prefix=""):
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


@cache
def composed(*overrides, with_hydra=False):
    """Hydra's own composition of `python train.py <overrides>`. Not to be changed: copy it."""
    config.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return hydra_compose("config", list(overrides), return_hydra_config=with_hydra)


def checked(words):
    """What `compose(words.split())` gives or raises, without composing the same groups again (0.1 s)."""
    groups = [word for word in words.split() if "." not in word.split("=")[0]]
    values = [word for word in words.split() if word not in groups]
    whole = copy.deepcopy(composed(*groups))
    whole.merge_with_dotlist(values)
    return config.typed(whole)


# --- files -----------------------------------------------------------------------------------


def test_every_file_and_folder_is_tested():
    # counted by another means than the glob: a glob that misses a folder would test nothing in it
    walked = [(folder, files) for folder, _, files in os.walk(CONF)]
    assert sum(len(files) for _, files in walked) == len(FILES) >= 44
    assert {os.path.relpath(folder, CONF) for folder, files in walked if files} - {*NO_GROUPS} == {
        g for g, _ in CHOICES
    }
    assert {group for group, _ in CHOICES} >= {f.name for f in fields(Config)} - {
        *("seed", "name", "tags", "check", "on_error", "on_unsupported", "rerun", "meter", "verdict", "probe", "paths")
    }


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_every_choice_composes_to_what_its_file_states(group, choice):
    words = [f"{group}={choice}", *NEEDS.get((group, choice), [])]
    assert isinstance(config.typed(composed(*words)), Config)
    whole = composed(*words, with_hydra=group.startswith("hydra/"))
    inside = "" if group == "experiment" else f"{group.replace('/', '.')}."
    given = {word.split("=")[0] for word in NEEDS.get((group, choice), [])}
    for key, value in stated(f"{group}/{choice}.yaml").items():
        if inside + key in given or (isinstance(value, str) and "${" in value):
            continue
        node = OmegaConf.select(whole, inside + key)
        if OmegaConf.is_config(node):
            node = OmegaConf.to_container(node, resolve=True)
        assert (node.name if isinstance(node, Enum) else node) == value, inside + key


@pytest.mark.parametrize("group", [group for group, choice in CHOICES if choice == "custom"])
def test_a_custom_choice_without_a_target_is_refused(group):
    needs = [word for word in NEEDS[group, "custom"] if not word.startswith(f"{group}._target_")]
    with pytest.raises(InputError) as caught:
        compose([f"{group}=custom", *needs])
    assert str(caught.value).startswith(f"{group}._target_")
    assert f"write {group}=custom {group}._target_=module.Name." in str(caught.value)


def test_the_hydra_choices_shipped_are_the_ones_in_use():
    whole = composed(with_hydra=True)
    for group in ("launcher", "sweeper"):
        (choice,) = [choice for where, choice in CHOICES if where == f"hydra/{group}"]
        assert whole.hydra.runtime.choices[f"hydra/{group}"] == choice
        assert callable(get_object(whole.hydra[group]._target_))


@pytest.mark.parametrize("path", [path for path in FILES if path.parent.name == "wandb_sweep"], ids=str)
def test_a_file_for_wandb_agents_asks_for_what_there_is(path):
    """An agent runs `command` with one value of each parameter, and W&B looks for `metric` in the summary."""
    asked = yaml.safe_load((CONF / path).read_text())
    assert (config.ROOT / asked["program"]).is_file()
    assert asked["project"] == composed().wandb.project
    fixed = [word for word in asked["command"] if not word.startswith("${")]
    assert asked["command"][-1] == "${args_no_hyphens}"  # else an agent's values would be Hydra's own options
    for key, choice in asked["parameters"].items():
        for value in choice.get("values") or [choice[end] for end in ("value", "min", "max") if end in choice]:
            got = OmegaConf.select(composed(*fixed, f"{key}={value}"), "precision.name" if key == "precision" else key)
            assert got == value
    prefix, name = asked["metric"]["name"].split("/")
    assert prefix in ("final", "best")
    metric = METRICS[name.replace("_", "/", 1)]
    assert asked["metric"]["goal"] == {"lower": "minimize", "higher": "maximize"}[metric.better]


# --- the names of runs and sweeps ---------------------------------------------------------------


def test_a_run_without_a_name_takes_its_experiment_s():
    unnamed, named = composed(), composed("name=mine")
    assert config.typed(unnamed, "study").name == "study"
    assert config.typed(composed("name=''"), "study").name == "study"
    assert config.typed(named, "study").name == "mine"
    assert config.typed(unnamed, None).name is None
    assert replace(config.typed(unnamed, "study"), name=None) == config.typed(unnamed)  # and nothing else


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        *(
            (None, "unnamed"),
            ("", "unnamed"),
            (".", "unnamed"),
            ("..", "unnamed"),
            ("/", "unnamed"),
            (" - ", "unnamed"),
        ),
        *(("my-study_2.1", "my-study_2.1"), ("two words", "two-words"), ("Zürich\n", "Zürich"), ("-rf", "rf")),
        *(("/etc/passwd", "etc-passwd"), ("../../etc", "etc"), ("a/../b", "a-..-b"), ("a\\b", "a-b"), (".git", "git")),
        *(("$(x)`y`;*?", "x-y"), ("${nowhere}", "nowhere"), ("a,b=c", "a-b-c"), ("😀", "unnamed"), ("\0", "unnamed")),
        *(("x" * 300, "x" * 80), ("é" * 300, "é" * 80), ("漢" * 300, "漢" * 80)),
    ],
)
def test_the_name_of_a_sweep_is_fit_for_a_folder(name, folder):
    assert config.sweep_name(name) == folder
    assert len(folder.encode()) <= 255  # what a file system takes


@pytest.mark.parametrize(
    "words", ["", "name=a/b", "name='two,words'", "experiment=smoke", "experiment=smoke name=null"]
)
def test_the_command_of_a_sweep_is_written_beside_its_jobs(words):
    """Its folder is named by conf/config.yaml, the jobs' by a run's own name."""
    whole = copy.deepcopy(composed(*words.split(), with_hydra=True))
    folder, experiment = Path(whole.hydra.sweep.dir), whole.hydra.runtime.choices.experiment
    with open_dict(whole):
        del whole["hydra"]
    assert folder.parent == sweep_folder(config.typed(whole, experiment)) / "commands"


# --- no default hidden in code --------------------------------------------------------------


def schemas(node=Config):
    yield node
    for f in fields(node):
        if is_dataclass(f.type):
            yield from schemas(f.type)


@pytest.mark.parametrize("schema", list(schemas()), ids=lambda schema: schema.__name__)
def test_no_schema_holds_a_default(schema):
    assert fields(schema)
    for f in fields(schema):
        assert f.default == MISSING, f"{schema.__name__}.{f.name}"


def test_every_key_has_a_value_in_yaml():
    assert OmegaConf.missing_keys(composed()) == set()
    in_yaml = stated("config.yaml").keys()
    for section in ("seed", "name", "tags", "check", "on_error", "on_unsupported", "rerun"):
        assert section in in_yaml
    for section in ("meter", "probe", "paths"):
        names = {f.name for f in fields({f.name: f.type for f in fields(Config)}[section])}
        assert {key.split(".")[1] for key in in_yaml if key.startswith(f"{section}.")} == names
    for group, base in (("precision", "fp32"), ("device", "auto"), ("trainer", "default"), ("wandb", "default")):
        names = {f.name for f in fields({f.name: f.type for f in fields(Config)}[group])}
        assert set(stated(f"{group}/{base}.yaml")) == names, group


@pytest.mark.parametrize(("group", "choice"), [c for c in CHOICES if c[0] in open_sets.NAMES and c[1] != "custom"])
def test_every_argument_of_our_own_targets_stands_in_yaml(group, choice):
    node = getattr(config.typed(composed(f"{group}={choice}", *NEEDS.get((group, choice), []))), group)
    if not node["_target_"].startswith("precision_lab."):
        assert node["_target_"].startswith("torch.optim.")
        return
    parameters = inspect.signature(get_object(node["_target_"])).parameters.values()
    named = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}
    if group == "scheduler":
        named -= {"step", "total_steps"}  # the schedule's own arguments
    assert set(node) - {"_target_", "kind"} == named


# --- precision ------------------------------------------------------------------------------

F32, BF16, F16 = Dtype.float32, Dtype.bfloat16, Dtype.float16
# arm: parameters, autocast, loss scaling, float32 mode
ARMS = {
    "auto": (F32, None, False, "ieee"),
    "fp32": (F32, None, False, "ieee"),
    "fp32_perturbed": (F32, None, False, "ieee"),
    "tf32": (F32, None, False, "tf32"),
    "bf16": (F32, BF16, False, "ieee"),
    "bf16_pure": (BF16, None, False, "ieee"),
    "fp16": (F32, F16, True, "ieee"),
    "fp16_unscaled": (F32, F16, False, "ieee"),
}


def test_the_table_of_arms_is_whole():
    assert set(PRECISIONS) == set(ARMS)


@pytest.mark.parametrize("name", PRECISIONS)
def test_a_precision_file_means_what_its_name_says(name):
    raw = yaml.safe_load((CONF / "precision" / f"{name}.yaml").read_text())
    assert raw["name"] == name
    assert set(raw) - {"defaults"} <= {f.name for f in fields(config.PrecisionConfig)}
    arm = compose([f"precision={name}"]).precision
    assert arm == load_precision(name)
    assert (arm.param_dtype, arm.autocast_dtype, arm.grad_scaling, arm.float32_matmul.name) == ARMS[name]
    assert arm.float32_conv is arm.float32_matmul
    assert arm.fp32_modules == []
    assert arm.weight_noise == (1e-7 if name == "fp32_perturbed" else 0)


LEGAL = [
    "precision=fp16 precision.grad_scaling=false",
    "precision=fp16_unscaled precision.grad_scaling=true",
    "precision=fp16 precision.init_scale=1.0 precision.min_scale=1.0",
    "precision=fp16 precision.min_scale=1e-3",
    "precision=bf16 precision.fp32_modules=[head]",
    "precision=bf16 precision.float32_matmul=tf32",
    "precision=fp32 precision.autocast_dtype=bfloat16",
    "precision=tf32 precision.float32_conv=ieee",
    "precision=bf16 precision.weight_noise=1e-7",
    "precision=fp32 precision.max_consecutive_skips=1 precision.growth_interval=1",
]
NOTHING_TO_SCALE = (
    "precision.grad_scaling=true needs precision.autocast_dtype=float16: "
    "{} does not have float16's narrow range, so there is nothing to scale."
)
SCALES = (
    "precision.init_scale={} and precision.min_scale={} must be finite, above 0, and the first not below the second."
)
ILLEGAL = [
    ("precision=bf16 precision.grad_scaling=true", NOTHING_TO_SCALE.format("bf16")),
    ("precision=fp32 precision.grad_scaling=true", NOTHING_TO_SCALE.format("fp32")),
    ("precision=tf32 precision.grad_scaling=true", NOTHING_TO_SCALE.format("tf32")),
    ("precision=fp16 precision.autocast_dtype=bfloat16", NOTHING_TO_SCALE.format("fp16")),
    ("precision=fp16 precision.autocast_dtype=null", NOTHING_TO_SCALE.format("fp16")),
    (
        "precision=fp32 precision.autocast_dtype=float32",
        "precision.autocast_dtype=float32 does nothing; use null for no autocast, bfloat16 or float16.",
    ),
    (
        "precision=bf16_pure precision.autocast_dtype=bfloat16",
        "precision.param_dtype=bfloat16 and precision.autocast_dtype cannot be combined: "
        "autocast needs float32 parameters.",
    ),
    (
        "precision=fp32 precision.param_dtype=float16",
        "precision.param_dtype=float16 is not supported: AdamW's eps is 0 in float16 and its gradients cannot be "
        "unscaled; use float32 parameters with precision.autocast_dtype=float16.",
    ),
    (
        "precision=fp16 precision.param_dtype=bfloat16",
        "precision.param_dtype=bfloat16 and precision.autocast_dtype cannot be combined: "
        "autocast needs float32 parameters.",
    ),
    (
        "precision=fp32 precision.fp32_modules=[head]",
        "precision.fp32_modules keeps modules out of autocast, and precision.autocast_dtype is null.",
    ),
    (
        "precision=bf16_pure precision.fp32_modules=[head]",
        "precision.fp32_modules keeps modules out of autocast, and precision.autocast_dtype is null.",
    ),
    *(
        (
            f"precision=fp32 precision.weight_noise={value}",
            f"precision.weight_noise={float(value)} must be from 0 to 1: a share of each weight.",
        )
        for value in ("-0.5", "nan", "inf")
    ),
    ("precision=fp16 precision.min_scale=0", SCALES.format("65536.0", "0.0")),
    ("precision=fp16 precision.min_scale=-1", SCALES.format("65536.0", "-1.0")),
    ("precision=fp16 precision.init_scale=0.5", SCALES.format("0.5", "1.0")),
    ("precision=fp16 precision.init_scale=nan", SCALES.format("nan", "1.0")),
    ("precision=fp16 precision.init_scale=inf", SCALES.format("inf", "1.0")),
    ("precision=fp16 precision.min_scale=nan", SCALES.format("65536.0", "nan")),
    (
        "precision=fp16 precision.growth_interval=0",
        "precision.growth_interval=0 is too small; it must be at least 1.",
    ),
    (
        "precision=bf16 precision.max_consecutive_skips=0",
        "precision.max_consecutive_skips=0 is too small; it must be at least 1.",
    ),
    (
        "precision=auto precision.min_scale=2",
        "precision=auto takes no further precision settings; name the precision to change one.",
    ),
    (
        "precision=auto precision.autocast_dtype=bfloat16",
        "precision=auto takes no further precision settings; name the precision to change one.",
    ),
]


@pytest.mark.parametrize("words", LEGAL)
def test_a_legal_precision(words):
    precision = checked(words).precision
    for word in words.split()[1:]:
        key, value = word.removeprefix("precision.").split("=")
        got = getattr(precision, key)
        if isinstance(got, Dtype | Float32Mode):
            assert got.name == value
        elif isinstance(got, list):
            assert got == [value.strip("[]")]
        else:
            assert float(got) == float({"true": 1, "false": 0}.get(value, value))


@pytest.mark.parametrize(("words", "sentence"), ILLEGAL, ids=[words for words, _ in ILLEGAL])
def test_an_illegal_precision(words, sentence):
    with pytest.raises(InputError) as caught:
        checked(words)
    assert str(caught.value) == sentence


def test_as_values_is_plain():
    values = as_values(compose(["precision=fp16", "precision.fp32_modules=[a,b]"]))
    assert values["precision"]["param_dtype"] == "float32"
    assert values["precision"]["autocast_dtype"] == "float16"
    assert values["precision"]["fp32_modules"] == ["a", "b"]

    assert values["device"] == {
        "type": "auto",
        "threads": None,
        "channels_last": False,
        "compile": False,
        "memory_budget_gib": None,
    }
    assert as_values({1: (Dtype.float16, 2)}) == {"1": ["float16", 2]}


# --- the other invariants, by sentence ------------------------------------------------------

ONE_OF_TWO = (
    "Exactly one of trainer.steps and trainer.epochs must be set; "
    "set the other to null: trainer.steps=null trainer.epochs=1."
)
REFUSED = [
    ("trainer.epochs=1", ONE_OF_TWO),
    ("trainer.steps=null", ONE_OF_TWO),
    *(
        (f"{key}={value}", f"{key}={value} is too small; it must be at least {value + 1}.")
        for key, value in {
            "trainer.steps": 0,
            "trainer.batch_size": 0,
            "trainer.accumulation": 0,
            "trainer.log_every": 0,
            "trainer.eval_every": 0,
            "trainer.workers": -1,
            "meter.warmup_steps": -1,
            "device.threads": 0,
        }.items()
    ),
    ("trainer.steps=null trainer.epochs=0", "trainer.epochs=0 is too small; it must be at least 1."),
    ("trainer.grad_clip=0", "trainer.grad_clip=0.0 must be above 0 and finite, or null for no clipping."),
    ("trainer.grad_clip=nan", "trainer.grad_clip=nan must be above 0 and finite, or null for no clipping."),
    ("seed=-1", "seed=-1 is out of range; it must be from 0 to 4294967295."),
    ("seed=4294967296", "seed=4294967296 is out of range; it must be from 0 to 4294967295."),
    ("optimizer.lr=0", "optimizer.lr=0 must be a finite number above 0."),
    ("optimizer.lr=inf", "optimizer.lr=inf must be a finite number above 0."),
    ("optimizer.lr=true", "optimizer.lr=True must be a finite number above 0."),
    ("optimizer.weight_decay=-0.1", "optimizer.weight_decay=-0.1 must be a finite number not below 0."),
    ("optimizer=sgd optimizer.momentum=nan", "optimizer.momentum=nan must be a finite number not below 0."),
    ("model.kind=audio", "model.kind=audio is unknown; valid are images, tokens and null (not checked)."),
    (
        "model.image_size=16 dataset.image_size=8",
        "model.image_size=16 and dataset.image_size=8 differ; set one of them to null to follow the other.",
    ),
    (
        "dataset=torchvision dataset.name=SVHN",
        "dataset.name=SVHN is unknown; valid are MNIST, FashionMNIST, CIFAR10, CIFAR100.",
    ),
    (
        "model=gpt dataset=text_file dataset.path=/nowhere/text",
        "dataset.path=/nowhere/text is not a file; name a text file.",
    ),
]


@pytest.mark.parametrize(("words", "sentence"), REFUSED, ids=[words for words, _ in REFUSED])
def test_a_refused_value(words, sentence):
    with pytest.raises(InputError) as caught:
        checked(words)
    assert str(caught.value) == sentence


def test_a_class_of_the_user_s_may_take_a_pair_where_ours_take_a_number():
    asked = compose(["model=custom", "model._target_=mine.Net", "+model.image_size=[32,48]"])
    assert asked.model["image_size"] == [32, 48]


@pytest.mark.parametrize(
    "words",
    ["seed=0", "seed=4294967295", "trainer.steps=1", "meter.warmup_steps=0", "optimizer.weight_decay=0"],
)
def test_the_smallest_and_largest_valid_values(words):
    key, value = words.split("=")
    node = checked(words)
    for part in key.split("."):
        node = node[part] if isinstance(node, dict) else getattr(node, part)
    assert node == int(value)


# --- model x dataset x precision: one real step ---------------------------------------------

ON_CPU = [name for name in PRECISIONS if name not in ("auto", "tf32")]
IMAGES = {
    "digits": [],
    "synthetic_images": ["dataset.samples=64", "dataset.image_size=8"],
    "image_folder": ["dataset.image_size=8"],
}
TOKENS = {
    "synthetic_tokens": ["dataset.samples=16", "dataset.vocab_size=8"],
    "stdlib_text": ["dataset.max_bytes=4000"],
    "text_file": [f"dataset.path={__file__}"],
}
TINY = {
    "mlp": ["model.hidden=[4]"],
    "cnn": ["model.widths=[2,4]"],
    "gpt": ["model.layers=1", "model.heads=2", "model.width=8", "model.context=6"],
}
MATRIX = [
    *(("mlp", dataset) for dataset in IMAGES),
    *(("cnn", dataset) for dataset in IMAGES),
    *(("gpt", dataset) for dataset in TOKENS),
]


@pytest.fixture(scope="module")
def picture_folder(tmp_path_factory):
    from PIL import Image

    root = tmp_path_factory.mktemp("pictures")
    for split in ("train", "val"):
        for label, shade in (("dark", 20), ("light", 200)):
            folder = root / split / label
            folder.mkdir(parents=True)
            for i in range(4):
                Image.new("RGB", (9 + i, 8), (shade, 5 * i, shade)).save(folder / f"{i}.png")
    return root


def one_step(precision, *overrides):
    """The policy, the model, its weights before, and the loss of one step, all as the run does it."""
    words = [*overrides, "trainer.batch_size=4", "scheduler=constant", "optimizer.lr=0.05", "device=cpu"]
    asked = replace(config.typed(composed(*words)), precision=load_precision(precision))
    policy = Policy(asked.precision, hardware.select_device(asked.device))
    policy.apply_backends()
    workload = build_workload(asked)
    model = policy.prepare(workload.model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = Trainer(
        asked.trainer, policy, workload.task, model, build_optimizer(asked.optimizer, model), lambda *_: 1.0
    )
    batches = TrainBatches(workload.data.train, 4, 0, place_on("cpu", False))
    losses = []
    trainer.window.add_loss = lambda loss: losses.append(loss.detach())
    trainer.step(batches)
    (loss,) = losses
    return policy, model, before, loss, workload.data.facts


def assert_one_real_step(policy, model, before, loss, facts):
    classes = facts.get("num_classes") or facts["vocab_size"]
    assert loss.dtype is torch.float32
    assert loss.item() == pytest.approx(math.log(classes), abs=1.5)  # near that of a uniform guess
    for name, p in model.named_parameters():
        assert p.dtype is policy.param_dtype, name
        assert p.grad.dtype is policy.param_dtype, name
        assert torch.isfinite(p).all(), name
    assert any(not torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("precision", ON_CPU)
@pytest.mark.parametrize(("model", "dataset"), MATRIX)
def test_one_step(model, dataset, precision, picture_folder):
    extra = (IMAGES | TOKENS)[dataset] + ([f"dataset.root={picture_folder}"] if dataset == "image_folder" else [])
    words = [f"model={model}", f"dataset={dataset}", *TINY[model], *extra]
    assert_one_real_step(*one_step(precision, *words))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_one_step_of_a_torchvision_model(precision):
    words = ["model=torchvision", "model.name=shufflenet_v2_x0_5", "model.image_size=32", "dataset=synthetic_images"]
    assert_one_real_step(*one_step(precision, *words, "dataset.samples=16"))


def test_tf32_is_refused_on_a_cpu():
    device = hardware.select_device(DeviceConfig(config.DeviceType.cpu, None, False, False, None))
    with pytest.raises(InputError, match="precision=tf32 needs tf32, which this cpu device does not have"):
        hardware.check_support(load_precision("tf32"), device, hardware.dtype_support(device))

"""What counts for a run's identity, key by key, and the names made of it."""

import copy
import re
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache

import pytest

from precision_lab import config as config_module
from precision_lab.config import Config
from precision_lab.identity import arm_label, experiment_signature, run_signature, slug

# Configs that between them hold every key there is, those of the open sets' own choices included.
BASES = {
    "default": [],
    "sgd and constant": ["optimizer=sgd", "scheduler=constant", "model=cnn", "dataset=synthetic_images"],
    "text": ["model=gpt", "dataset=text_file", f"dataset.path={__file__}"],
    "tokens": ["model=gpt", "dataset=synthetic_tokens"],
    "stdlib": ["model=gpt", "dataset=stdlib_text"],
    "torchvision": ["model=torchvision", "dataset=cifar10", "dataset.download=true"],
    "folder": ["dataset=image_folder", "dataset.root=/", "dataset.image_size=8"],
}

# All that may differ between comparable runs; whatever is not named here is the experiment.
NOT_THE_EXPERIMENT = {
    *("seed", "name", "tags", "check", "on_error", "on_unsupported", "rerun"),
    *("device.type", "device.threads", "device.memory_budget_gib"),
    *("trainer.log_every", "trainer.eval_every", "trainer.workers"),
    *("trainer.resume", "trainer.checkpoint_every", "trainer.checkpoint_minutes"),
    *(
        "probe.memory",
        "probe.ranges",
        "wandb.mode",
        "wandb.project",
        "wandb.group",
        "wandb.extras",
        "paths.root",
        "paths.outputs",
        "paths.data",
    ),
    *("dataset.root", "dataset.path", "dataset.download"),
    *("model.kind", "dataset.kind", "task.kind"),
    *("precision.name", "precision.param_dtype", "precision.autocast_dtype", "precision.grad_scaling"),
    *("precision.init_scale", "precision.growth_interval", "precision.min_scale"),
    *("precision.max_consecutive_skips", "precision.float32_matmul", "precision.float32_conv"),
    *("precision.fp32_modules", "precision.fp32_ops", "precision.emulate"),
    "precision.weight_noise",
}


@cache
def _compose(words: tuple) -> Config:
    return config_module.compose(list(words))


def compose(words: list) -> Config:
    """A config of the test's own to change."""
    return copy.deepcopy(_compose(tuple(words)))


def leaf_paths(value, path=()):
    if is_dataclass(value):
        for f in fields(value):
            yield from leaf_paths(getattr(value, f.name), (*path, f.name))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from leaf_paths(item, (*path, key))
    else:
        yield path


def get(node, key):
    return node[key] if isinstance(node, dict) else getattr(node, key)


def other(value):
    """A value of the same kind that differs."""
    if isinstance(value, Enum):
        return next(member for member in type(value) if member is not value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, list):
        return [*value, "more"]
    return "something" if value is None else f"{value}x"


def with_other(config: Config, path: tuple) -> Config:
    """A copy in which one leaf differs. Past the checks: what counts must not depend on what is valid."""
    changed = copy.deepcopy(config)
    node = changed
    for key in path[:-1]:
        node = get(node, key)
    value = other(get(node, path[-1]))
    if isinstance(node, dict):
        node[path[-1]] = value
    else:
        setattr(node, path[-1], value)
    return changed


@pytest.mark.parametrize("base", BASES)
def test_exactly_these_keys_do_not_count(base):
    config = compose(BASES[base])
    experiment, run = experiment_signature(config), run_signature(config)
    paths = {".".join(path): path for path in leaf_paths(config)}
    assert len(paths) > 45
    same_experiment = {
        key for key, path in paths.items() if experiment_signature(with_other(config, path)) == experiment
    }
    assert same_experiment == NOT_THE_EXPERIMENT & set(paths)
    same_run = {key for key, path in paths.items() if run_signature(with_other(config, path)) == run}
    of_the_run = {key for key in paths if key == "seed" or key.startswith("precision.")}
    if "dataset.name" not in paths:  # torchvision's sets are the same wherever they lie
        of_the_run |= {"dataset.root", "dataset.path"}
    assert same_run == same_experiment - of_the_run


def test_the_table_names_no_key_that_does_not_exist():
    seen = {".".join(path) for words in BASES.values() for path in leaf_paths(compose(words))}
    assert seen >= NOT_THE_EXPERIMENT


def test_runs_on_two_files_are_two_runs_of_one_experiment():
    """A sweep finds finished jobs by their run: it must not take one file's for another's."""
    one, two = (
        compose(["model=gpt", "dataset=text_file", f"dataset.path={path}"]) for path in (__file__, "/etc/hosts")
    )
    assert experiment_signature(one) == experiment_signature(two)
    assert run_signature(one) != run_signature(two)
    assert slug(one, "cpu") != slug(two, "cpu")


def test_a_file_of_weights_is_part_of_the_experiment():
    """A place that the data hash does not speak for counts: it decides what is trained."""
    words = ["model=custom", "model._target_=mine.Net"]
    one, two = (compose([*words, f"+model.path={name}.pt"]) for name in ("a", "b"))
    assert experiment_signature(one) != experiment_signature(two)


def test_signatures_are_eight_hex_digits_and_stay_the_same():
    config = compose([])
    assert re.fullmatch("[0-9a-f]{8}", experiment_signature(config))
    assert re.fullmatch("[0-9a-f]{8}", run_signature(config))
    assert experiment_signature(config) == experiment_signature(compose([]))
    assert run_signature(config) != experiment_signature(config)


def test_the_order_of_arguments_does_not_count():
    config = compose([])
    changed = copy.deepcopy(config)
    changed.model = dict(reversed(config.model.items()))
    assert list(changed.model) != list(config.model)
    assert run_signature(changed) == run_signature(config)


LABELS = {
    "precision=fp32": "fp32",
    "precision=auto": "auto",
    "precision=bf16_pure": "bf16_pure",
    "precision=fp16 precision.fp32_modules=[head]": "fp16[fp32_modules=head]",
    "precision=fp16 precision.fp32_modules=[head,norm]": "fp16[fp32_modules=head+norm]",
    "precision=fp16 precision.init_scale=1024": "fp16[init_scale=1024.0]",
    "precision=fp16 precision.init_scale=65536": "fp16",
    "precision=tf32 precision.float32_conv=ieee": "tf32[float32_conv=ieee]",
    "precision=fp16 precision.autocast_dtype=bfloat16 precision.grad_scaling=false": (
        "fp16[autocast_dtype=bfloat16,grad_scaling=False]"
    ),
    "precision=bf16 precision.fp32_modules=[head] precision.max_consecutive_skips=3": (
        "bf16[max_consecutive_skips=3,fp32_modules=head]"
    ),
    "precision=bf16 precision.autocast_dtype=null": "bf16[autocast_dtype=None]",
}


@pytest.mark.parametrize("words", LABELS)
def test_the_label_of_an_arm(words):
    assert arm_label(compose(words.split()).precision) == LABELS[words]


def test_the_slug_of_a_run():
    config = compose(["precision=bf16", "seed=7", "dataset=synthetic_images"])
    assert slug(config, "cpu") == f"mlp_synthetic-images_bf16_s7_cpu_{run_signature(config)}"


def test_the_slug_of_an_arm_in_capitals():
    config = compose(["precision=bf16"])
    config.precision.name = "BF16_Mine"
    assert slug(config, "cpu").startswith("mlp_digits_bf16-mine_s0_cpu_")


@pytest.mark.parametrize(
    "name",
    ["../../etc/passwd", "a/b\\c", "two words", "Zürich\n", "..", "-rf", "$(x)`y`;*?", "😀", "a_b__c", "x" * 300],
)
def test_the_slug_is_a_safe_file_name_whatever_the_name(name):
    config = compose([])
    config.model["name"] = name
    text = slug(config, "cpu")
    assert re.fullmatch(r"[a-z0-9._-]+", text)
    assert ".." not in text or "/" not in text
    assert not text.startswith(("/", "_"))
    assert text.endswith(f"_s0_cpu_{run_signature(config)}")
    assert len(text) <= 230  # a file name has 255 bytes, and the time stands before it


def test_the_slug_tells_names_apart_that_look_alike():
    one, two = compose([]), compose([])
    one.model["name"], two.model["name"] = "a b", "a/b"
    assert slug(one, "cpu") != slug(two, "cpu")

"""What a run is asked to do: schemas and checks. Knows Hydra, refuses to know torch.

Every default value stands in `conf/`; the dataclasses here hold types and invariants only, so
that a typo or a wrong type fails at composition and names the key. `model`, `dataset`, `task`,
`optimizer` and `scheduler` are open sets (a `_target_` and its arguments) and stay plain dicts.
A field with `metadata=NOT_IDENTITY` does not count for the experiment's identity.
"""

import os
import re
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from precision_lab import open_sets, ranges
from precision_lab.arm_schema import WHERE_SET, PrecisionConfig
from precision_lab.errors import InputError, at_least, require
from precision_lab.redaction import redact, secrets_in
from precision_lab.wording import is_composing, unknown_key, word

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf"
MOST_WORKERS = 256
MOST_GIB = 2.0**20
NOT_IDENTITY = {"identity": False}
# Fields that the configs of older runs lack, with what stands for their absence.
ADDED = {"precision": {"fp32_ops": [], "emulate": None}, "probe": {"ranges": None}, "wandb": {"extras": []}}


class DeviceType(Enum):
    """What to run on; auto takes cuda, else mps, else cpu."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"
    mps = "mps"


class WandbMode(Enum):
    """Where the mirror goes: a server, local files alone, or nowhere."""

    online = "online"
    offline = "offline"
    disabled = "disabled"


# What W&B gets of a run beside its numbers.
Extra = Enum("Extra", ["memory", "op_map", "config", "checkpoint", "alert"])
# What a sweep does after a failed job, with an arm that the machine cannot do, and with finished jobs.
OnError = Enum("OnError", ["continue", "stop"])
OnUnsupported = Enum("OnUnsupported", ["stop", "skip"])
Rerun = Enum("Rerun", ["never", "failed", "all"])


@dataclass
class DeviceConfig:
    """Where a run runs and how the device is used. `threads` are the CPU's."""

    type: DeviceType = field(default=MISSING, metadata=NOT_IDENTITY)
    threads: int | None = field(default=MISSING, metadata=NOT_IDENTITY)
    channels_last: bool = MISSING
    compile: bool = MISSING
    memory_budget_gib: float | None = field(default=MISSING, metadata=NOT_IDENTITY)

    def __post_init__(self) -> None:
        at_least("device.threads", self.threads, 1)
        cores = os.cpu_count() or 1
        require(
            self.threads is None or self.threads <= cores,
            f"device.threads={self.threads} is more than this machine's {cores} cores.",
        )
        ranges.above_0("device.memory_budget_gib", self.memory_budget_gib, "no limit")
        at_least("device.memory_budget_gib", self.memory_budget_gib, 0, MOST_GIB)


@dataclass
class TrainerConfig:
    """How long and on how much at a time. `grad_clip` is the largest L2 norm of the gradient."""

    steps: int | None = MISSING
    epochs: int | None = MISSING
    batch_size: int = MISSING
    accumulation: int = MISSING
    grad_clip: float | None = MISSING
    log_every: int = field(default=MISSING, metadata=NOT_IDENTITY)
    eval_every: int | None = field(default=MISSING, metadata=NOT_IDENTITY)
    workers: int = field(default=MISSING, metadata=NOT_IDENTITY)
    init_from: str | None = field(default=MISSING, metadata=WHERE_SET)
    resume: str = field(default=MISSING, metadata=NOT_IDENTITY)
    checkpoint_every: int | None = field(default=MISSING, metadata=NOT_IDENTITY)
    checkpoint_minutes: float | None = field(default=MISSING, metadata=NOT_IDENTITY)

    def __post_init__(self) -> None:
        require(
            (self.steps is None) != (self.epochs is None),
            "Exactly one of trainer.steps and trainer.epochs must be set; "
            "set the other to null: trainer.steps=null trainer.epochs=1.",
        )
        for name in ("steps", "epochs", "batch_size", "accumulation", "log_every", "eval_every", "checkpoint_every"):
            at_least(f"trainer.{name}", getattr(self, name), 1)
        at_least("trainer.workers", self.workers, 0, MOST_WORKERS)
        ranges.above_0("trainer.grad_clip", self.grad_clip, "no clipping")
        ranges.above_0("trainer.checkpoint_minutes", self.checkpoint_minutes, "none by time")
        ranges.weights("trainer.init_from", self.init_from)
        require(
            self.resume in ("auto", "never") or os.path.exists(self.resume),
            f"trainer.resume={self.resume} does not exist; valid are auto, never, and the path of a run's folder or of "
            "a checkpoint in it.",
        )


@dataclass
class MeterConfig:
    """Which steps the time and memory figures leave out."""

    warmup_steps: int = MISSING

    def __post_init__(self) -> None:
        at_least("meter.warmup_steps", self.warmup_steps, 0)


@dataclass
class ProbeConfig:
    """Instruments beside the training; none may change a loss by a bit."""

    memory: bool = MISSING
    ranges: int | None = MISSING

    def __post_init__(self) -> None:
        at_least("probe.ranges", self.ranges, 1)


@dataclass
class VerdictConfig:
    """What counts as the same loss. Part of the experiment's identity: it cannot be chosen afterwards."""

    loss_margin: float = MISSING

    def __post_init__(self) -> None:
        require(
            0 < self.loss_margin < 1,
            f"verdict.loss_margin={self.loss_margin} must be above 0 and below 1: a share of the reference arm's loss.",
        )


@dataclass
class WandbConfig:
    """Where the mirror of the run's numbers goes, and what else goes there."""

    mode: WandbMode = MISSING
    project: str = MISSING
    group: str | None = MISSING
    extras: list[Extra] = MISSING

    def __post_init__(self) -> None:
        require(
            re.fullmatch(r"[^/\\#?%:]{1,128}", self.project) is not None,
            f"wandb.project={self.project} is no name of a project: 1 to 128 characters, none of / \\ # ? % :.",
        )


@dataclass
class PathsConfig:
    """Folders: of the repository, of what runs leave behind, of downloaded data."""

    root: str = MISSING
    outputs: str = MISSING
    data: str = MISSING

    def __post_init__(self) -> None:
        for key, path in vars(self).items():
            ranges.folder(f"paths.{key}", path)


@dataclass
class Config:
    """A run, whole. What is not identity may differ between comparable runs."""

    seed: int = field(default=MISSING, metadata=NOT_IDENTITY)
    name: str | None = field(default=MISSING, metadata=NOT_IDENTITY)
    tags: list[str] = field(default=MISSING, metadata=NOT_IDENTITY)
    check: bool = field(default=MISSING, metadata=NOT_IDENTITY)
    on_error: OnError = field(default=MISSING, metadata=NOT_IDENTITY)
    on_unsupported: OnUnsupported = field(default=MISSING, metadata=NOT_IDENTITY)
    rerun: Rerun = field(default=MISSING, metadata=NOT_IDENTITY)
    precision: PrecisionConfig = field(default=MISSING, metadata=NOT_IDENTITY)
    model: dict[str, Any] = MISSING
    dataset: dict[str, Any] = MISSING
    task: dict[str, Any] = MISSING
    optimizer: dict[str, Any] = MISSING
    scheduler: dict[str, Any] = MISSING
    device: DeviceConfig = MISSING
    trainer: TrainerConfig = MISSING
    meter: MeterConfig = MISSING
    verdict: VerdictConfig = MISSING
    probe: ProbeConfig = field(default=MISSING, metadata=NOT_IDENTITY)
    wandb: WandbConfig = field(default=MISSING, metadata=NOT_IDENTITY)
    paths: PathsConfig = field(default=MISSING, metadata=NOT_IDENTITY)

    def __post_init__(self) -> None:
        # torch.Generator takes a wider range, numpy's legacy seeding only this one
        require(0 <= self.seed < 2**32, f"seed={self.seed} is out of range; it must be from 0 to 4294967295.")
        ranges.texts("tags", self.tags)
        open_sets.check({group: getattr(self, group) for group in open_sets.NAMES})
        ranges.not_compiled("probe.ranges", self.probe.ranges is not None, self.device.compile)
        op_map = Extra.op_map in self.wandb.extras
        ranges.not_compiled("wandb.extras=[op_map]", op_map, self.device.compile)
        self._check_replaced_autocast()
        stated = load_precision(self.precision.name)
        if self.precision.name == "auto":
            require(
                self.precision == stated,
                "precision=auto takes no further precision settings; name the precision to change one.",
            )

    def _check_replaced_autocast(self) -> None:
        emulate, device = self.precision.emulate, self.device
        require(
            emulate is None or device.type in (DeviceType.auto, DeviceType.cpu),
            f"precision.emulate needs the CPU, which carries out what {emulate and emulate.name} would do; set "
            "device=cpu.",
        )
        asked = [key for key in ("fp32_ops", "emulate") if getattr(self.precision, key)]
        require(
            not (asked and device.compile),
            f"precision.{asked and asked[0]} and device.compile=true cannot be combined: compiled graphs are kept "
            "from run to run by what the code says, which neither changes.",
        )


# --- composing -----------------------------------------------------------------------------


def register() -> None:
    """Give Hydra the root schema and the resolver for the repository's folder."""
    ConfigStore.instance().store(name="schema", node=Config)
    OmegaConf.register_new_resolver("precision_lab.root", lambda: str(ROOT), replace=True)
    OmegaConf.register_new_resolver("precision_lab.wandb", _wandb_variable, replace=True)
    OmegaConf.register_new_resolver("precision_lab.sweep", _sweep_of, replace=True)


def check_options(words: list[str]) -> None:
    """Raise InputError for words with dashes that are no options of Hydra's: it would print all it has."""
    parser = get_args_parser()

    def refuse(message: str) -> None:
        if re.match(r"unrecognized arguments: [^-]+=", message) and {"-m", "--multirun"} & set(words):
            message = "-m goes first: python train.py -m seed=0,1 ..."
        raise InputError(f"{message}. Overrides are written key=value, without dashes; --hydra-help lists the options.")

    parser.error = refuse
    parser.parse_args(words)


def _sweep_of(name: str | None, experiment: str | None) -> str:
    return sweep_name(name or experiment)


def sweep_name(name: str | None) -> str:
    """The name of a sweep's folder: free text made fit for a path, `unnamed` without any."""
    shown = redact(name or "", secrets_in(os.environ))
    fit = re.sub(r"[^\w.-]+", "-", shown).strip(".-")
    # a file's name may have 255 bytes, and a letter up to four of them
    return fit[:80].encode()[:240].decode(errors="ignore").strip(".-") or "unnamed"


def _wandb_variable(name: str, default: str) -> str:
    # set but empty counts as not set; W&B has second names for two of its modes
    value = os.environ.get(name) or default
    return {"dryrun": "offline", "run": "online"}.get(value, value) if name == "WANDB_MODE" else value


def typed(composed: Any, experiment: str | None = None) -> Config:
    """Turn Hydra's composed config into checked dataclasses; raise InputError where it cannot.

    A run without a name of its own takes that of its `experiment`.
    """
    try:
        _check_keys(composed, Config)
        asked = OmegaConf.to_object(composed)
        return asked if asked.name else replace(asked, name=experiment)
    except OmegaConfBaseException as error:
        raise InputError(word(error, [], Config, CONF)) from error


def _check_keys(node: DictConfig, schema: type, prefix: str = "") -> None:
    # `+trainer.stepz=5` adds a key that to_object would hand on without a word
    types = {f.name: f.type for f in fields(schema)}
    for key in node:
        if key not in types:
            raise InputError(unknown_key(f"{prefix}{key}", Config))
    for key in types:  # `~seed` takes one away
        require(key in node, f"{prefix}{key} has no value; every key of the configuration needs one.")
        if is_dataclass(types[key]) and not OmegaConf.is_missing(node, key):
            _check_keys(node[key], types[key], f"{prefix}{key}.")


def as_values(value: Any) -> Any:
    """Plain dicts, lists and scalars of a typed config; enums as their names."""
    if is_dataclass(value):
        return {f.name: as_values(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, dict):
        return {str(key): as_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_values(item) for item in value]
    return value.name if isinstance(value, Enum) else value


def compose(overrides: list[str]) -> Config:
    """The typed config that `python train.py <overrides>` would run with (for scripts and tests)."""
    register()
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            composed = hydra_compose("config", overrides, return_hydra_config=True)
        with open_dict(composed):
            experiment = composed.pop("hydra").runtime.choices.get("experiment")
        return typed(composed, experiment)
    except Exception as error:
        if not is_composing(error):
            raise
        raise InputError(word(error, overrides, Config, CONF)) from error


def of_values(values: dict[str, Any], source: str) -> Config:
    """The typed config of plain values that a run has stored; InputError where `source` holds no such."""
    try:
        return typed(OmegaConf.merge(OmegaConf.structured(Config), ADDED, values))
    except (OmegaConfBaseException, InputError, ValueError, TypeError, RecursionError) as error:
        reason = error if isinstance(error, InputError) else word(error, [], Config, CONF)
        raise InputError(f"{source} holds no config that can be used here: {reason}") from error


def load_precision(name: str) -> PrecisionConfig:
    """The arm exactly as `conf/precision/<name>.yaml` states it."""
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(PrecisionConfig), _stated_precision(name)))


def _stated_precision(name: str) -> DictConfig:
    path = CONF / "precision" / f"{name}.yaml"
    require(os.path.isfile(path), f"precision.name={name} has no file {path.relative_to(ROOT)}.")
    stated = OmegaConf.load(path)
    bases = [_stated_precision(base) for base in stated.pop("defaults", []) if base != "_self_"]
    return OmegaConf.merge(*bases, stated)

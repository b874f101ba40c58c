"""The words by which W&B names, groups and filters a run: of its config, its arm and its machine. No torch."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from precision_lab import folders, identity, open_sets
from precision_lab.config import Config, WandbConfig, as_values
from precision_lab.redaction import redact
from precision_lab.tracking.mirror import Mirror
from precision_lab.tracking.of_folder import FolderMirror


def words_of(
    config: dict[str, Any], arm: str, experiment: str, environment: dict[str, Any], device: str
) -> dict[str, Any]:
    """Group, tags and config, from a config's plain values: what runs are filtered by stands at the top.

    `experiment` is the signature; `environment` needs fingerprint, versions, git and host. An older version's config
    may lack the rest.
    """
    precision, name = config["precision"], config.get("name")
    group = (config.get("wandb") or {}).get("group")
    emulate = precision.get("emulate")
    flat = {
        "precision": arm,
        "emulate": emulate,
        "model": open_sets.label(config["model"]),
        "dataset": open_sets.label(config["dataset"]),
        "device_name": (device_name := environment["fingerprint"].get("model")),
        "precision_on_device": f"{arm} on {device_name}",  # a chart of W&B's groups by one key
        "host": environment["host"],
        "seed": config["seed"],
        "compile": (config.get("device") or {}).get("compile"),
        "torch_version": environment["versions"]["torch"],
        "git_sha": environment["git"]["sha"],
        "experiment_signature": experiment,
    }
    return {
        "group": group or (f"{name}-{experiment}" if name else experiment),
        "tags": [precision["name"], device, *["emulated"] * bool(emulate), *map(str, config.get("tags") or [])],
        "config": flat | {"config": config},
    }


def mirror_of_run(asked: Config, environment: dict[str, Any], secrets: list[str], folder: Path) -> FolderMirror:
    """The W&B run of a training that begins in `folder`."""
    outputs, device = folders.outputs(asked), environment["fingerprint"]["device"]
    name = identity.slug(asked, device)
    words = _words_asked(asked, device, environment, secrets)
    return FolderMirror(folder, outputs, without_secrets(asked.wandb, secrets), name=name, job_type="train", **words)


def mirror_of(asked: Config, device: str, environment: dict[str, Any], secrets: list[str], job_type: str) -> Mirror:
    """The W&B run of something else, which no folder is compared by."""
    words = _words_asked(asked, device, environment, secrets)
    name = f"{job_type}_{identity.slug(asked, device)}"
    return Mirror(without_secrets(asked.wandb, secrets), folders.outputs(asked), name=name, job_type=job_type, **words)


def _words_asked(asked: Config, device: str, environment: dict[str, Any], secrets: list[str]) -> dict[str, Any]:
    arm, experiment = identity.arm_label(asked.precision), identity.experiment_signature(asked)
    return redact(words_of(as_values(asked), arm, experiment, environment, device), secrets)


def without_secrets(asked: WandbConfig, secrets: list[str]) -> WandbConfig:
    """Where a mirror goes: a project may be named by a variable that holds a key."""
    return replace(asked, project=redact(asked.project, secrets))

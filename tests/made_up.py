"""Results written by hand: no run made them, and no figure in them was measured."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

NOTE = "made up for a test: not measured"
H100 = {"device": "cuda", "model": "Made-up H100", "count": 1, "capability": "9.0", "memory_gib": 80, "threads": 8}
V100 = {"device": "cuda", "model": "Made-up V100", "count": 1, "capability": "7.0", "memory_gib": 16, "threads": 8}
XEON = {"device": "cpu", "model": "Made-up Xeon", "count": 2, "capability": "avx2", "memory_gib": 8, "threads": 1}
SUPPORT = {
    "Made-up H100": {"float32": "native", "tf32": "native", "bfloat16": "native", "float16": "native"},
    "Made-up V100": {"float32": "native", "tf32": "no", "bfloat16": "emulated", "float16": "native"},
    "Made-up Xeon": {"float32": "native", "tf32": "no", "bfloat16": "emulated", "float16": "emulated"},
}
_PRECISION = {"autocast_dtype": None, "param_dtype": "float32", "grad_scaling": False, "init_scale": 65536.0}
ARMS = {
    "fp32": {"name": "fp32"},
    "tf32": {"name": "tf32", "float32_matmul": "tf32"},
    "bf16": {"name": "bf16", "autocast_dtype": "bfloat16"},
    "fp16": {"name": "fp16", "autocast_dtype": "float16", "grad_scaling": True},
    "bf16_pure": {"name": "bf16_pure", "param_dtype": "bfloat16"},
}
_RESULT: dict[str, Any] = {
    "note": NOTE,
    "schema": 1,
    "status": "completed",
    "reason": None,
    "step": 200,
    "applied_steps": 200,
    "experiment_signature": "01234567",
    "hashes": {"data": "dada", "initial_weights": "w", "batches": "b", "losses": "l"},
    "host": "here",
    "versions": {"python": "3.12.1", "torch": "2.14.1", "cuda": None},
    "git": {"sha": "abcdef0123456789", "dirty": False},
    "overrides": ["model=mlp", "precision=fp32", "seed=0"],
    "memory": {
        "source": "allocator events",
        "batch_size": 64,
        "phase": "backward",
        "peak_bytes": 4 * 2**30,
        "by_kind": {
            "parameters": 2**30,
            "gradients": 2**29,
            "optimizer_state": 2**31,
            "saved_activations": 2**28,
            "weight_casts": 0,
            "batch": 2**26,
            "temporaries": 3 * 2**26,
            "kernel_scratch": 0,
        },
    },
    "curve": {"step": [100, 200], "train_s": [0.2, 0.4], "val_loss_fp32": [1.0, 0.5]},
    "config": {
        "name": "night",
        "seed": 0,
        "tags": [],
        "model": {"_target_": "precision_lab.models.MLP", "hidden": [256, 256]},
        "dataset": {"_target_": "precision_lab.datasets.digits"},
        "task": {"_target_": "precision_lab.task.classification"},
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": 0.001},
        "scheduler": {"_target_": "precision_lab.optim.cosine"},
        "verdict": {"loss_margin": 0.0025},
        "trainer": {"steps": 200, "epochs": None, "batch_size": 64, "log_every": 50},
        "device": {"type": "auto", "threads": None, "compile": False},
    },
    "summary": {
        "final/val_loss_fp32": 0.5,
        "final/val_loss": 0.5,
        "final/val_accuracy": 0.75,
        "final/perf_step_ms_p50": 2.0,
        "final/perf_samples_per_s": 32000.0,
        "final/perf_data_wait_share": 0.02,
        "final/perf_measured_steps": 190,
        "final/mem_peak_allocated_gib": 4.0,
        "final/mem_saved_activations_mib": 100.0,
        "final/amp_skipped_steps": 0,
        "final/amp_loss_scale": 1.0,
    },
}


def result(arm: str = "fp32", seed: int = 0, machine: dict[str, Any] = XEON, **changes: Any) -> dict[str, Any]:
    """A result of one run; `changes` are of figures by their last words (`step_ms_p50=1.0`) or of top keys."""
    made = deepcopy(_RESULT)
    made |= {"arm": arm, "seed": seed, "fingerprint": dict(machine), "support": SUPPORT[machine["model"]]}
    made["finished"] = 1_000_000.0 + seed
    made["config"] |= {"seed": seed, "precision": _PRECISION | ARMS[arm.partition("[")[0]]}
    for key, value in changes.items():
        figure = next((name for name in made["summary"] if name.endswith((f"_{key}", f"/{key}"))), None)
        if figure:
            made["summary"][figure] = value
        elif isinstance(made.get(key), dict):
            made[key] |= value
        else:
            made[key] = value
    return made


def put(folder: Path, made: dict[str, Any] | None = None, **words: Any) -> Path:
    """Write a run folder with that result, or with `result(**words)`."""
    folder.mkdir(parents=True)
    made = made or result(**words)
    (folder / "result.json").write_text(json.dumps(made))
    (folder / "status.json").write_text(json.dumps({"status": made["status"]}))
    return folder

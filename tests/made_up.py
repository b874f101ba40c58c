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
    "fp32_perturbed": {"name": "fp32_perturbed", "weight_noise": 1e-7},
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
        "final/train_spike_score": 0.0,
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
    name, _, emulated = arm.partition("[emulate=")
    made["config"] |= {"seed": seed, "precision": _PRECISION | ARMS[name.partition("[")[0]]}
    if emulated:
        made["config"]["precision"]["emulate"] = emulated.rstrip("]")
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


def benchmark(machine: dict[str, Any] = XEON, floor: tuple = (1.0, 0.995, 1.005), **ratios: Any) -> dict[str, Any]:
    """A benchmark of fp32 and the arms named, `bf16=(1.5, 1.48, 1.52)`: ratio and interval, computing alone.

    Columns of another kind are added by `column`.
    """
    arms = {"fp32": None, **ratios}
    made = {
        "note": NOTE,
        "schema": 1,
        "name": "night",
        "experiment_signature": _RESULT["experiment_signature"],
        "data_hash": _RESULT["hashes"]["data"],
        "fingerprint": dict(machine),
        "finished": 2_000_000.0,
        "settings": {"arms": ",".join(arms), "reference": "fp32", "budget_s": 60.0, "half_width": 0.01},
        "conditions": {"start": {"busy_cores": 0.1, "cores": 8}, "end": {"busy_cores": 0.1, "cores": 8}},
        "energy": "not measured: no CUDA device",
        "reference": "fp32",
        "stopped_by": "width",
        "seconds": 30.0,
        "sittings": 10,
        "in_processes": False,
        "warm_up_capped": 0,
        "arms": {
            arm: {
                "precision": _PRECISION | ARMS[arm],
                "without": None,
                "data_share": None,
                "skipped_steps": 0,
                "compile_s": None,
                "joules_per_sample": [],
            }
            for arm in arms
        },
        "columns": [column("fp32", None), column("fp32", floor, again=True)],
    }
    made |= {key: _RESULT[key] for key in ("host", "versions", "git", "config")}
    made |= {"support": SUPPORT[machine["model"]]}
    made["columns"] += [column(arm, ratio) for arm, ratio in ratios.items()]
    return made


def column(arm: str, ratio: tuple | None, **changes: Any) -> dict[str, Any]:
    """One kind of step: `ratio` is (value, low, high) of 120 pairs, None for the reference arm."""
    made = {"arm": arm, "again": False, "compiled": False, "with_data": False, "step_ms": 2.0 / (ratio or [1])[0]}
    made |= {"step_ms_p25": made["step_ms"] * 0.98, "step_ms_p75": made["step_ms"] * 1.02, "steps_of_a_block": 5}
    made |= {
        "busy_share": None,
        "over_eager": None,
        "ratio": None,
        "seconds_a_step": [[made["step_ms"] / 1e3 * (1 + 1e-3 * n) for n in range(2)] for _ in range(10)],
    }
    if ratio:
        made["ratio"] = dict(zip(("value", "low", "high"), ratio, strict=True)) | {"pairs": 120}
    return made | changes


def put_benchmark(folder: Path, made: dict[str, Any]) -> Path:
    """Write a benchmark's folder."""
    folder.mkdir(parents=True)
    (folder / "benchmark.json").write_text(json.dumps(made))
    return folder

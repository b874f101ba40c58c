"""A run as a person starts it: `python train.py ...`, its exit code, its words and what it leaves behind."""

import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from precision_lab import inspection
from precision_lab import run as run_module
from precision_lab.config import ROOT, compose
from precision_lab.errors import InputError

MINE = Path(__file__).parent / "own_code" / "mine.py"
TINY = ["model=mlp", "model.hidden=[16]", "dataset=digits", "trainer.steps=12", "trainer.batch_size=32"]
TINY += ["trainer.log_every=5", "meter.warmup_steps=2", "probe.memory=false"]
OWN = ["model=custom", "dataset=custom", "dataset._target_=mine.line_data", "task=custom", "trainer.batch_size=8"]
OWN += ["trainer.steps=6", "trainer.log_every=2", "probe.memory=false", "meter.warmup_steps=2", "precision=fp32"]
CNN = ["model=cnn", "model.widths=[16,32]", "dataset=digits", "trainer.steps=1"]


def own(model="mine.Line", task="mine.regression", *more):
    return [*OWN, f"model._target_={model}", f"task._target_={task}", *more]


# Every run of this file, by name: started when a test asks for it, once.
COMMANDS = {
    "fp32": ["precision=fp32", *TINY, "seed=3"],
    "fp32_again": ["precision=fp32", *TINY, "seed=3"],
    "fp32_observed": [
        "precision=fp32",
        *TINY,
        "seed=3",
        "trainer.log_every=3",
        "trainer.eval_every=4",
        "probe.memory=true",
    ],
    "fp32_other_seed": ["precision=fp32", *TINY, "seed=4"],
    "bf16": ["precision=bf16", *TINY, "seed=3", "wandb.mode=offline"],
    "fp16": ["precision=fp16", *TINY, "seed=3"],
    "bf16_pure": ["precision=bf16_pure", *TINY, "seed=3"],
    "function_task": own(),
    "class_task": own("mine.Line", "mine.Regression", "+task.weight=0.5", "+model.width=5", "precision=bf16"),
    "diverging": own("mine.Line", "mine.nothing_but_nan"),
    "raising": own("mine.Raises"),
    "raising_in_evaluation": own("mine.RaisesInEvaluation"),
    "greedy": own("mine.Greedy"),
    "exiting": own("mine.Exits"),
    "ctrl_c": own("mine.Killed", "mine.regression", "+model.name=SIGINT", "trainer.steps=100000"),
    "sigterm": own("mine.Killed", "mine.regression", "+model.name=SIGTERM", "trainer.steps=100000"),
    "sighup": own("mine.Killed", "mine.regression", "+model.name=SIGHUP", "trainer.steps=100000"),
    "bad_output": own("mine.Line", "precision_lab.task.LanguageModel"),
    "check": ["check=true", "precision=fp32", *TINY],
    "several_without_m": ["precision=fp32,bf16", *TINY],
    "basic_launcher": ["-m", "hydra/launcher=basic", "precision=fp32,bf16", *TINY],
    "cnn_fp32": ["precision=fp32", *CNN],
    "cnn_bf16": ["precision=bf16", *CNN],
    "torchvision": [
        *("precision=fp32", "model=torchvision", "model.name=mobilenet_v3_small", "dataset=digits"),
        *("trainer.steps=2", "trainer.batch_size=4", "dataset.train_fraction=0.98"),
    ],
}


@dataclass
class Run:
    code: int
    out: str
    err: str
    outputs: Path
    left_in_cwd: list[str]

    @property
    def folder(self) -> Path:
        (folder,) = self.outputs.glob("runs/*/*")
        return folder

    def json(self, name: str) -> dict:
        return json.loads((self.folder / name).read_text())

    @property
    def result(self) -> dict:
        return self.json("result.json")

    @property
    def metrics(self) -> list[dict]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    @property
    def log(self) -> str:
        return (self.folder / "train.log").read_text()

    @property
    def words(self) -> str:
        return self.out + self.err


SLOW = ("bad_output", "cnn_fp32", "cnn_bf16", "torchvision")


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """Ask for runs by name. Each is done once, two at a time, in an empty working directory."""
    chosen = [item for item in request.session.items if item.path == Path(__file__)]
    home = tmp_path_factory.mktemp("home")
    shutil.copy(MINE, home / "mine.py")
    done: dict[str, Future] = {}
    with ThreadPoolExecutor(2) as pool:

        def start(*names: str) -> None:
            for name in names:
                if name not in done:
                    done[name] = pool.submit(_do, COMMANDS[name], home, tmp_path_factory.mktemp(name))

        def ask(*names: str):
            start(*names)
            results = [done[name].result() for name in names]
            return results if len(results) > 1 else results[0]

        if len(chosen) > 12:  # most of this file: start early what will be asked for
            start(*(name for name in COMMANDS if name not in SLOW))
        yield ask


def _do(words: list[str], home: Path, folder: Path) -> Run:
    outputs, cwd = folder / "outputs", folder / "elsewhere"
    cwd.mkdir()
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(home), environment.get("PYTHONPATH", "")])
    environment["WANDB_MODE"] = "disabled"  # a mode named on the command line counts for more
    fixed = ["device=cpu", "device.threads=1", f"paths.outputs={outputs}"]
    command = [sys.executable, str(ROOT / "train.py"), *words, *fixed]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=200)
    return Run(done.returncode, done.stdout, done.stderr, outputs, sorted(path.name for path in cwd.iterdir()))


# ---- what a run leaves behind ---------------------------------------------------------------------------


def test_a_run_leaves_its_files_and_says_how_it_ended(runs):
    run = runs("fp32")
    assert run.code == 0
    assert {path.name for path in run.folder.iterdir()} == {
        *("config.yaml", "environment.json", "metrics.jsonl", "result.json", "status.json", "train.log")
    }
    assert run.folder.parents[1] == run.outputs / "runs"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", run.folder.parent.name)
    assert re.fullmatch(r"\d\d-\d\d-\d\d-\d{6}_mlp_digits_fp32_s3_cpu_[0-9a-f]{8}", run.folder.name)
    assert len([line for line in run.out.splitlines() if line.startswith("fp32: completed at step 12")]) == 1
    assert "val loss" in run.out
    assert run.err == ""


def test_status_result_and_metrics_agree(runs):
    run = runs("fp32")
    status, result, metrics = run.json("status.json"), run.result, run.metrics
    assert (status["status"], status["step"], status["reason"], status["wandb"]) == ("completed", 12, None, "disabled")
    assert status["started"] <= status["updated"]
    assert (result["schema"], result["status"], result["step"], result["applied_steps"]) == (1, "completed", 12, 12)
    assert (result["arm"], result["seed"]) == ("fp32", 3)
    assert run.folder.name.endswith(result["run_signature"])
    assert all(re.fullmatch("[0-9a-f]{16}", result["hashes"][key]) for key in ("data", "initial_weights", "batches"))
    assert [line["train/step"] for line in metrics] == [5, 10, 12]
    assert all(line["train/loss"] > 0 and line["train/grad_norm"] > 0 for line in metrics)
    assert ["val/loss" in line for line in metrics] == [False, False, True]
    summary = result["summary"]
    for name in ("train/loss", "val/loss", "val/loss_fp32", "val/accuracy", "train/lr"):
        assert summary[f"final/{name.replace('/', '_')}"] == metrics[-1][name]
    assert summary["best/val_loss"] == summary["final/val_loss"] == summary["final/val_loss_fp32"]
    assert 0 < summary["final/perf_step_ms_p50"] <= summary["final/perf_step_ms_p95"]
    assert summary["final/perf_samples_per_s"] > 0
    assert (summary["final/amp_skipped_steps"], summary["final/amp_loss_scale"]) == (0, 1.0)
    assert summary["final/train_spike_score"] is None  # fewer than 101 steps


def test_environment_holds_flags_support_and_the_labels_proof(runs):
    environments = {arm: run.json("environment.json") for arm, run in zip(ARMS, runs(*ARMS), strict=True)}
    bits = {"fp32": ("float32", 23), "bf16": ("bfloat16", 7), "fp16": ("float16", 10), "bf16_pure": ("bfloat16", 7)}
    for arm, facts in environments.items():
        proof, flags = facts["label_proof"], facts["backend_flags"]
        assert (proof["linear_dtype"], proof["linear_bits"]) == bits[arm]
        assert (proof["conv_dtype"], proof["conv_bits"]) == bits[arm]
        assert {flags[key] for key in flags if key.endswith("_fp32")} == {"ieee"}
        assert set(facts["support"]) == {"float32", "tf32", "bfloat16", "float16"}
        assert facts["fingerprint"] == runs(arm).result["fingerprint"]
        assert facts["fingerprint"]["threads"] == 1
        assert facts["versions"]["torch"]
        assert facts["command"][0].endswith("train.py")


def test_the_config_can_be_loaded_and_is_what_was_asked(runs):
    run = runs("fp32")
    stated = yaml.safe_load((run.folder / "config.yaml").read_text())
    assert stated == run.result["config"]
    assert (stated["precision"]["name"], stated["seed"], stated["trainer"]["steps"]) == ("fp32", 3, 12)
    asked = compose([*COMMANDS["fp32"], "device=cpu", "device.threads=1", f"paths.outputs={run.outputs}"])
    assert stated["model"] == asked.model
    assert stated["optimizer"] == asked.optimizer


def test_the_log_holds_what_the_terminal_showed(runs):
    run = runs("fp32")
    assert run.folder.name in run.log
    for line in run.out.strip().splitlines():
        assert line in run.log


def test_offline_wandb_files_lie_in_the_shared_folder_and_nowhere_else(runs):
    run = runs("bf16")
    assert run.code == 0
    assert run.json("status.json")["wandb"] == "offline"
    files = list((run.outputs / "wandb").rglob("run-*.wandb"))
    assert files
    assert all(file.stat().st_size > 0 for file in files)
    assert {path.name for path in run.outputs.iterdir()} == {"runs", "wandb"}
    assert "wandb:" not in run.words


# ---- the same and not the same ----------------------------------------------------------------------------

ARMS = ("fp32", "bf16", "fp16", "bf16_pure")


def test_one_seed_gives_equal_weights_and_batches_in_every_arm(runs):
    results = [run.result for run in runs(*ARMS)]
    assert {result["status"] for result in results} == {"completed"}
    for key in ("data", "initial_weights", "batches"):
        assert len({result["hashes"][key] for result in results}) == 1, key
    assert len({result["hashes"]["losses"] for result in results}) == 4
    assert len({result["experiment_signature"] for result in results}) == 1
    assert len({result["run_signature"] for result in results}) == 4


def test_the_same_command_gives_the_same_losses_bit_for_bit(runs):
    first, second = (run.result for run in runs("fp32", "fp32_again"))
    assert first["hashes"] == second["hashes"]
    for key in ("final/train_loss", "final/val_loss", "final/val_accuracy"):
        assert first["summary"][key] == second["summary"][key]


def test_instruments_leave_no_trace_in_the_losses(runs):
    plain, observed = (run.result for run in runs("fp32", "fp32_observed"))
    assert plain["hashes"] == observed["hashes"]
    assert plain["summary"]["final/val_loss"] == observed["summary"]["final/val_loss"]
    assert plain["run_signature"] == observed["run_signature"]
    metrics = runs("fp32_observed").metrics
    assert [line["train/step"] for line in metrics] == [3, 4, 6, 8, 9, 12]
    curve = observed["curve"]
    evaluated = {line["train/step"]: line["val/loss_fp32"] for line in metrics if "val/loss_fp32" in line}
    assert curve["step"] == list(evaluated) == [4, 8, 12]
    assert curve["val_loss_fp32"] == list(evaluated.values())
    assert 0 < curve["train_s"][0] < curve["train_s"][1] < curve["train_s"][2] < metrics[-1]["perf/elapsed_s"]
    assert "final/mem_saved_activations_mib" not in plain["summary"]
    assert observed["summary"]["final/mem_saved_activations_mib"] > 0
    assert observed["summary"]["final/mem_peak_allocated_gib"] > 0


def test_another_seed_gives_other_weights_and_batches_on_the_same_data(runs):
    first, other = (run.result["hashes"] for run in runs("fp32", "fp32_other_seed"))
    assert first["data"] == other["data"]
    assert first["initial_weights"] != other["initial_weights"]
    assert first["batches"] != other["batches"]
    assert first["losses"] != other["losses"]


# ---- a user's own code ---------------------------------------------------------------------------------


def test_own_model_data_and_function_task(runs):
    run = runs("function_task")
    assert run.code == 0, run.words
    assert run.result["status"] == "completed"
    summary = run.result["summary"]
    assert summary["final/val_loss"] > 0
    assert "final/val_accuracy" not in summary
    assert "_line_line_data_fp32_" in run.folder.name.replace("-", "_")


def test_own_class_task_with_a_metric_it_declares(runs):
    run = runs("class_task")
    assert run.code == 0, run.words
    summary = run.result["summary"]
    assert summary["final/val_mae"] > 0
    assert summary["best/val_mae"] <= summary["final/val_mae"]
    assert run.result["config"]["model"]["width"] == 5
    assert run.metrics[-1]["val/mae"] == summary["final/val_mae"]


@pytest.mark.slow
def test_a_torchvision_model(runs):
    run = runs("torchvision")
    assert run.code == 0, run.words
    assert run.result["status"] == "completed"
    assert "_mobilenet" in run.folder.name


# ---- ends that are not completed ------------------------------------------------------------------------


def test_a_run_that_diverges_is_a_result(runs):
    run = runs("diverging")
    assert run.code == 0
    result, status = run.result, run.json("status.json")
    assert (result["status"], status["status"]) == ("diverged", "diverged")
    assert "none of 6 steps was finite" in result["reason"]
    assert result["reason"] == status["reason"]
    assert result["reason"] in run.out
    assert (result["step"], result["applied_steps"]) == (6, 0)
    assert run.metrics[0]["train/loss"] is None
    assert "train/loss" in run.metrics[0]["nonfinite"]
    assert result["summary"]["final/amp_nonfinite_steps"] == 6
    assert "Traceback" not in run.words


def test_a_model_that_raises_is_a_failed_run_of_one_line(runs):
    run = runs("raising")
    assert run.code == 1
    reason = "ValueError: the third gear is missing"
    assert run.json("status.json")["status"] == run.result["status"] == "failed"
    assert run.result["reason"] == reason
    assert "Traceback" in run.log
    assert "and a second line" in run.log
    assert "Traceback" not in run.words
    told = [line for line in run.words.splitlines() if "third gear" in line]
    assert told == [f"fp32: failed at step 0 ({reason}; see {run.folder / 'train.log'})"]


def test_an_evaluation_that_raises_loses_nothing_of_the_training_before(runs):
    run = runs("raising_in_evaluation")
    assert run.code == 1
    assert (run.result["status"], run.result["reason"]) == ("failed", "ValueError: no evaluation today")
    assert [line["train/step"] for line in run.metrics] == [2, 4, 6]
    assert run.result["step"] == 6
    assert run.result["summary"]["final/train_loss"] == run.metrics[-1]["train/loss"] > 0
    assert "final/val_loss" not in run.result["summary"]


def test_a_model_that_exits_is_a_failed_run(runs):
    run = runs("exiting")
    assert run.code == 1
    assert (run.result["status"], run.result["reason"]) == ("failed", "SystemExit: 0")


def test_out_of_memory_is_a_result(runs):
    run = runs("greedy")
    assert run.code == 0, run.words
    assert run.result["status"] == run.json("status.json")["status"] == "out_of_memory"
    assert run.result["reason"]
    assert "Traceback" not in run.words
    assert "Traceback" in run.log


def test_a_model_that_does_not_fit_is_refused_alone_and_a_result_in_a_sweep(monkeypatch, tmp_path):
    words = [word.replace("mine.", "own_code.mine.") for word in own("mine.DoesNotFit")]
    asked = compose([*words, "device=cpu", "name=night", f"paths.outputs={tmp_path}"])
    with pytest.raises(InputError, match=r"^The model alone does not fit into the memory of this cpu device\.$"):
        run_module.run(asked)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(run_module, "_a_job_ran", False)
    assert run_module.run(asked, sweep=True) == 0
    (result,) = [json.loads(path.read_text()) for path in tmp_path.glob("sweeps/night/*/result.json")]
    assert (result["status"], result["reason"].partition(" does")[0]) == ("out_of_memory", "The model alone")


@pytest.mark.parametrize(
    ("name", "code", "reason"), [("ctrl_c", 130, "Ctrl-C"), ("sigterm", 143, "SIGTERM"), ("sighup", 143, "SIGHUP")]
)
def test_an_interrupted_run_leaves_a_readable_result(runs, name, code, reason):
    run = runs(name)
    assert run.code == code, run.words
    assert run.json("status.json")["status"] == "interrupted"
    result = run.result
    assert (result["status"], result["reason"]) == ("interrupted", reason)
    assert result["step"] == 5  # in which the signal came; it was finished, and its state kept
    assert [path.name for path in (run.folder / "checkpoints").iterdir()] == ["step_00000005.pt"]
    assert [line["train/step"] for line in run.metrics] == [2, 4]
    assert result["summary"]["final/train_loss"] == run.metrics[-1]["train/loss"]
    assert "Traceback" not in run.words


@pytest.mark.slow
def test_an_output_that_a_task_cannot_read_is_wrong_input(runs):
    run = runs("bad_output")
    assert run.code in (1, 2)
    assert run.result["status"] == "failed"
    assert "Traceback" not in run.words


# ---- asked, but not run -----------------------------------------------------------------------------------


def test_check_makes_no_folder(runs):
    run = runs("check")
    assert run.code == 0
    assert not run.outputs.exists()
    assert "nothing was trained" in run.out


def test_nothing_is_left_where_a_run_was_started(runs):
    asked = runs("fp32", "bf16", "raising", "check", "several_without_m", "basic_launcher")
    assert [run.left_in_cwd for run in asked] == [[]] * 6


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "several_without_m",
            "precision=fp32,bf16 holds several values, and a run takes one; add -m to run them all.",
        ),
        (
            "basic_launcher",
            "hydra/launcher=basic runs all jobs in one process, where backend flags and memory peaks leak from one to "
            "the next; use hydra/launcher=isolated.",
        ),
    ],
)
def test_several_runs_in_one_process_are_refused(runs, name, sentence):
    run = runs(name)
    assert (run.code, run.out, run.err) == (2, "", f"precision-lab: {sentence}\n")
    assert not run.outputs.exists()


# ---- memory -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_cnn_keeps_half_the_activations_under_bf16(runs):
    full, low = (run.result["summary"]["final/mem_saved_activations_mib"] for run in runs("cnn_fp32", "cnn_bf16"))
    assert 0.49 <= low / full <= 0.55


def test_memory_that_cannot_be_measured_does_not_spoil_the_run(monkeypatch, tmp_path):
    def gone(ready):
        raise OSError("the disk is gone")

    monkeypatch.setattr(inspection, "training_batches", gone)
    asked = compose(["precision=fp32", *TINY, "probe.memory=true", "device=cpu", f"paths.outputs={tmp_path}"])
    assert run_module.run(asked) == 0
    (folder,) = tmp_path.glob("runs/*/*")
    assert json.loads((folder / "result.json").read_text())["status"] == "completed"
    assert "memory could not be measured: OSError: the disk is gone" in (folder / "train.log").read_text()

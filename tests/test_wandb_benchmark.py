"""A benchmark in W&B: its record, its columns and the ratios that are trusted, once all is timed; never in its way."""

import json
import os
import signal
import subprocess
import sys

import pytest

from made_up import ARMS, H100, benchmark, column, put, put_benchmark
from precision_lab.config import ROOT, WandbConfig, WandbMode
from precision_lab.report.compare import compare
from precision_lab.report.read import read
from precision_lab.tracking import of_benchmark
from precision_lab.tracking.of_benchmark import HEADER, BenchmarkMirror
from precision_lab.tracking.of_folder import RECORD, ledger_of
from precision_lab.tracking.refill import Wish, refill
from test_refill import Package, records
from typed_scripts import run

OFFLINE = WandbConfig(WandbMode.offline, "precision-lab", None, [])
LOUD = (1.02, 1.01, 1.03)  # a noise floor that leaves 1 out
WORDS = ["model=mlp", "model.hidden=[8]", "dataset=digits", "device=cpu", "device.threads=1", "trainer.batch_size=8"]
WORDS += ["arms=fp32,bf16", "budget_s=0.01", "name=night"]


def told(**words):
    made = benchmark(H100, **words)
    made["config"] = made["config"] | {"precision": ARMS["fp32"], "tags": ["mine"]}
    return made


def folder_of(outputs, made):
    return put_benchmark(outputs / "sweeps" / "night" / "benchmarks" / "2026-12-01_01-02-03-000000", made)


def mirrored(outputs, made, status="completed"):
    folder = folder_of(outputs, made)
    mirror = BenchmarkMirror(folder, outputs, made, OFFLINE)
    mirror.finish(status, None)
    return folder


@pytest.fixture
def wandb(monkeypatch):
    """The stand-in in the package's place."""
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setitem(sys.modules, "wandb", stand_in := Package())
    return stand_in


def tables(wandb):
    return {name: value for args in wandb.lines() for name, value in args.items() if "data" in value}


def test_what_wandb_is_given(wandb, tmp_path):
    made = told(bf16=(1.5, 1.48, 1.52), fp16=(0.9, 0.89, 0.91))
    folder = mirrored(tmp_path, made)
    given = wandb.given()
    assert (given["name"], given["job_type"]) == ("benchmark_mlp_digits_cuda_01234567", "benchmark")
    assert given["group"] == "night-01234567"  # that of the experiment's runs
    assert given["tags"] == ["fp32", "bf16", "fp16", "cuda", "mine"]
    config = given["config"]
    assert (config["arms"], config["reference"], config["precision"]) == (
        ["fp32", "bf16", "fp16"], "fp32", "fp32, bf16, fp16",
    )  # fmt: skip
    assert (config["device_name"], config["experiment_signature"]) == ("Made-up H100", "01234567")
    assert config["benchmark"]["budget_s"] == 60.0
    assert config["folder"] == folder.relative_to(tmp_path).as_posix()
    summary = wandb.summary_given()
    assert json.loads(summary[RECORD]) == json.loads((folder / "benchmark.json").read_text())
    ratios = {name: value for name, value in summary.items() if name.startswith("benchmark/speed")}
    assert ratios == {
        "benchmark/speed_ratio_bf16": 1.5, "benchmark/speed_ratio_bf16_low": 1.48,
        "benchmark/speed_ratio_bf16_high": 1.52, "benchmark/speed_ratio_fp16": 0.9,
        "benchmark/speed_ratio_fp16_low": 0.89, "benchmark/speed_ratio_fp16_high": 0.91,
    }  # fmt: skip
    assert (summary["status"], summary["benchmark/seconds"], summary["benchmark/stopped_by"]) == (
        "completed", 30.0, "width",
    )  # fmt: skip
    assert tables(wandb)["columns"] == {
        "columns": HEADER,
        "data": [
            ["fp32", "computing alone", 2.0, None, None, None, "reference", None],
            ["fp32 again", "computing alone", 2.0, 1.0, 0.995, 1.005, "noise floor", 120],
            ["bf16", "computing alone", 2.0 / 1.5, 1.5, 1.48, 1.52, "faster", 120],
            ["fp16", "computing alone", 2.0 / 0.9, 0.9, 0.89, 0.91, "slower", 120],
        ],
    }
    assert ledger_of(folder).whole


def test_a_ratio_that_no_noise_floor_vouches_for_is_no_figure_of_the_run(wandb, tmp_path):
    made = told(floor=LOUD, bf16=(1.5, 1.48, 1.52))
    made["columns"] += [column("fp32", None, with_data=True)]
    made["columns"] += [column("fp32", (1.0, 0.99, 1.01), again=True, with_data=True)]
    made["columns"] += [column("bf16", (1.2, 1.18, 1.22), with_data=True)]
    mirrored(tmp_path, made)
    figures = [name for name in wandb.summary_given() if name.startswith("benchmark/speed")]
    assert figures == [f"benchmark/speed_ratio_end_to_end_bf16{end}" for end in ("", "_low", "_high")]
    words = {tuple(row[:2]): row[6] for row in tables(wandb)["columns"]["data"]}
    assert (words["bf16", "computing alone"], words["bf16", "end to end"]) == ("no verdict", "faster")


def test_labels_become_names_that_wandb_sorts_by_each_its_own(wandb, tmp_path):
    made, odd = told(bf16=(1.5, 1.48, 1.52)), ["fp16[fp32_modules=a.b]", "fp16[fp32_modules=a+b]"]
    for value, label in enumerate(odd, 2):
        made["arms"][label] = made["arms"]["bf16"]
        made["columns"].append(column(label, (float(value), 1.9, 4.1)))
    mirrored(tmp_path, made)
    summary = wandb.summary_given()
    assert summary["benchmark/speed_ratio_fp16_fp32_modules_a_b"] == 2.0
    assert summary["benchmark/speed_ratio_fp16_fp32_modules_a_b_"] == 3.0
    assert summary["benchmark/speed_ratio_bf16"] == 1.5


def test_a_record_too_long_keeps_every_ratio_and_the_times_of_some_sittings(wandb, tmp_path, monkeypatch):
    made = told(bf16=(1.5, 1.48, 1.52))
    most = len(json.dumps(made, separators=(",", ":"))) // 2 + 1
    monkeypatch.setattr(of_benchmark, "LONGEST", most)
    folder = mirrored(tmp_path, made)
    text = wandb.summary_given()[RECORD]
    kept = json.loads(text)
    assert kept["times_of_every"] == 2
    assert [len(one["seconds_a_step"]) for one in kept["columns"]] == [5] * 3
    assert [one["ratio"] for one in kept["columns"]] == [one["ratio"] for one in made["columns"]]
    assert "times_of_every" not in json.loads((folder / "benchmark.json").read_text())
    (folder / "benchmark.json").write_text(text)  # as a comparison from W&B reads it
    assert str(read([put(tmp_path / "run").parent]).benchmarks[0].ratio("bf16")) == "1.500 [1.480, 1.520]"


def test_an_interrupted_one_says_so(wandb, tmp_path):
    mirrored(tmp_path, told(bf16=(1.5, 1.48, 1.52)) | {"stopped_by": "interrupted"}, "interrupted")
    assert wandb.summary_given()["status"] == "interrupted"
    assert [kwargs for name, _, kwargs in wandb.calls if name == "finish"] == [{"exit_code": 1}]


def test_the_ledger_in_its_folder_is_nothing_to_a_comparison(wandb, tmp_path):
    for arm in ("fp32", "bf16"):
        put(tmp_path / "sweeps" / "night" / arm, arm=arm, machine=H100)
    mirrored(tmp_path, told(bf16=(1.5, 1.48, 1.52)))
    found = read([tmp_path])
    assert (len(found.runs), len(found.benchmarks), found.skipped) == (2, 1, [])
    (one,) = compare(found)
    assert one.rows[1].timing.ratio.value == 1.5


def test_it_is_mirrored_later_once_and_a_damaged_one_is_named(wandb, tmp_path):
    made = told(bf16=(1.5, 1.48, 1.52))
    folder_of(tmp_path, made)
    put_benchmark(tmp_path / "benchmarks" / "2026-12-01" / "old", {key: made[key] for key in made if key != "columns"})
    outcomes = [(one.kind, one.text) for one in refill([tmp_path], Wish(WandbMode.offline))]
    assert [kind for kind, _ in outcomes] == ["left out", "mirrored"]
    assert outcomes[0][1] == "benchmark.json is damaged, or of an older version"
    assert wandb.begun == 1
    assert json.loads(wandb.summary_given()[RECORD]) == made
    assert [one.kind for one in refill([tmp_path], Wish(WandbMode.offline))] == ["left out", "whole before"]


# --- the script ------------------------------------------------------------------------------------------


def test_wandb_comes_when_all_is_written_and_its_failure_changes_nothing(tmp_path):
    (tmp_path / "wandb.py").write_text(
        "from pathlib import Path\n"
        "Settings = dict\n"
        "def init(**told):\n"
        "    print('written before:', len(list(Path(told['dir']).rglob('benchmark.json'))))\n"
        "    raise ConnectionError('unreachable')\n"
        "def teardown(): pass\n"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT / "src")])
    done = run("benchmark.py", *WORDS, f"paths.outputs={tmp_path / 'out'}", PYTHONPATH=path, WANDB_MODE="online")
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == (
        "W&B stopped (ConnectionError: unreachable); nothing else does, benchmark.json is complete, "
        "and scripts/mirror.py makes up for it."
    )
    assert done.stdout.index("written: ") < done.stdout.index("written before: 1")
    (folder,) = tmp_path.glob("out/sweeps/night/benchmarks/*")
    assert sorted(path.name for path in folder.iterdir()) == ["benchmark.json", "wandb.json"]
    assert json.loads((folder / "wandb.json").read_text())["whole"] is False


@pytest.mark.slow
def test_an_interrupted_benchmark_is_in_wandbs_own_files(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "WANDB_MODE": "offline", "OMP_NUM_THREADS": "1"}
    key = "correct-horse-battery"
    words = [*WORDS, "budget_s=600", "half_width=0.000001", f"paths.outputs={tmp_path}", "tags=[${oc.env:MY_API_KEY}]"]
    command = [sys.executable, str(ROOT / "scripts" / "benchmark.py"), *words]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment | {"MY_API_KEY": key}
    )
    with pytest.raises(subprocess.TimeoutExpired):
        process.communicate(timeout=20)
    assert not (tmp_path / "wandb").exists()  # nothing disturbs what is timed
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")
    (file,) = tmp_path.rglob("benchmark.json")
    (log,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    told = records(log)
    items = [one["summary"]["update"] for one in told if one["type"] == "summary"]
    summary = {key: value for item in items for key, value in item.items()}
    assert summary["status"] == "interrupted"
    assert json.loads(summary[RECORD]) == json.loads(file.read_text())
    (begun,) = [one["run"] for one in told if one["type"] == "run"]
    assert (begun["job_type"], begun["run_group"].partition("-")[0]) == ("benchmark", "night")
    assert summary["columns.nrows"] == 6
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path for path in files if key.encode() in path.read_bytes()] == []

"""A comparison in W&B: its rows, its charts as pictures, its page; written and printed all the same without it."""

import csv
import io
import json
import os
import re
import sys
from pathlib import Path

import numpy
import pytest
from PIL import Image

from html_pages import fleet, log
from made_up import H100, benchmark, put, put_benchmark, result
from precision_lab.config import ROOT, compose
from precision_lab.report import charts, drawing, files
from precision_lab.report.compare import compare
from precision_lab.report.page import page, sections_of
from precision_lab.report.read import read
from precision_lab.report.to_wandb import hand_over
from test_refill import Package, records
from typed_scripts import run

SECRET = "correct-horse-battery"
NAMES = ["validation_loss", "validation_loss_difference", "training_loss", "speed_ratio", "memory_by_kind"]
NAMES += ["loss_scale", "skipped_steps"]


class Shown(Package):
    """The stand-in, with pictures and pages; they and artifacts are read when they are handed over."""

    def Image(self, path, caption):
        return {"png": Path(path).read_bytes(), "caption": caption}

    def Html(self, text, inject):
        return {"html": text, "inject": inject}

    def log_artifact(self, artifact):
        self._call("artifact", artifact.name, artifact.type, Path(artifact.path).name, Path(artifact.path).read_text())

    def shown(self):
        return {name: value for values in self.lines() for name, value in values.items()}


@pytest.fixture
def wandb(monkeypatch):
    """The stand-in in the package's place."""
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setitem(sys.modules, "wandb", stand_in := Shown())
    return stand_in


def handed_over(sources, outputs, secrets=(), where=()):
    """(what is said, the comparisons, the page) once `hand_over` was called as the script does."""
    found = read(sources, where)
    comparisons = compare(found)
    sections = sections_of(comparisons)
    text = page(comparisons, found, None, sections)
    asked = compose(["wandb.mode=offline", f"paths.outputs={outputs}"])
    return hand_over(comparisons, found, sections, text, asked, list(secrets)), comparisons, text


def timed(folder):
    """Two runs, one of them on a benchmark's word."""
    for arm in ("fp32", "bf16"):
        put(folder / arm, arm=arm, machine=H100)
    put_benchmark(folder / "benchmarks" / "b", benchmark(H100, bf16=(1.5, 1.48, 1.52)))
    return folder


# --- what is handed over -------------------------------------------------------------------------------------


def test_the_run_is_named_grouped_and_filtered_by_what_was_compared(no_vega, wandb, tmp_path):
    folder = timed(tmp_path / "outputs" / "sweeps" / "night")
    said, comparisons, _ = handed_over([folder], tmp_path / "other", where=["arm=fp32,bf16"])
    assert wandb.given() == {
        "name": "compare_night",
        "group": "compare",
        "job_type": "compare",
        "tags": ["fp32", "bf16"],
        "project": "precision-lab",
        "mode": "offline",
        "config": {
            "job_type": "compare",
            "sources": [str(folder)],
            "where": ["arm=fp32,bf16"],
            "reference": "fp32",
            "arms": ["fp32", "bf16"],
            "device_names": ["Made-up H100"],
        },
    }
    (begun,) = [kwargs for name, _, kwargs in wandb.calls if name == "init"]
    assert begun["dir"] == str(tmp_path / "outputs")  # beside the runs
    assert said == f"{tmp_path}/outputs/wandb, run {wandb.id}"
    summary = wandb.summary_given()
    assert summary["verdict/1"].startswith("night on Made-up H100: ")
    counts = {key: summary[key] for key in ("comparisons", "runs", "left_out", "status")}
    assert counts == {"comparisons": 1, "runs": 2, "left_out": 0, "status": "completed"}
    assert summary["warnings"] == len(
        json.loads(files.as_json(comparisons, read([folder])))["comparisons"][0]["warnings"]
    )


def test_the_table_has_the_rows_of_the_csv(no_vega, wandb, tmp_path):
    fleet(tmp_path / "runs")
    put_benchmark(tmp_path / "runs" / "b", benchmark(H100, bf16=(1.5, 1.48, 1.52)))
    lost = result("bf16", 5, H100, val_loss_fp32=None)
    lost["summary"]["nonfinite"] = {"final/val_loss_fp32": "nan"}
    put(tmp_path / "runs" / "lost", lost)
    _, comparisons, _ = handed_over([tmp_path], tmp_path)
    header, *rows = csv.reader(io.StringIO(files.as_csv(comparisons)))
    table = wandb.shown()["arms"]
    assert table["columns"] == header
    assert [["" if value is None else str(value) for value in row] for row in table["data"]] == rows
    assert len(rows) == 6
    json.dumps(table["data"], allow_nan=False)  # a NaN is text
    told = [dict(zip(header, row, strict=True)) for row in table["data"]]
    assert [row["hardware"] for row in told] == ["Made-up H100, 80 GiB"] * 3 + ["Made-up V100, 16 GiB"] * 3
    assert [row["speed_timed"] for row in told] == [None, "in alternation", "in turn", None, "in turn", "in turn"]
    assert [(row["arm"], row["completed"], row["diverged"]) for row in told][:3] == [
        ("fp32", 2, 0), ("bf16", 3, 0), ("fp16", 1, 1)
    ]  # fmt: skip
    assert (told[1]["val_loss_fp32_mean"], told[1]["speed_ratio"]) == ("nan", 1.5)


def test_every_chart_of_the_page_is_a_picture_and_the_page_comes_whole(no_vega, wandb, tmp_path):
    _, _, text = handed_over([fleet(tmp_path / "runs")], tmp_path)
    shown = wandb.shown()
    assert list(shown) == ["arms", *(f"charts/{n}_{name}" for n in (1, 2) for name in NAMES), "page"]
    assert shown["page"] == {"html": text, "inject": False}
    assert shown["charts/1_training_loss"]["caption"].startswith("Training loss by training step, in each arm's own")
    assert [args for name, args, _ in wandb.calls if name == "artifact"] == [
        ("report_night", "report", "report.html", text)
    ]
    for name, value in shown.items():
        if name.startswith("charts/"):
            assert Image.open(io.BytesIO(value["png"])).width > 1400


def test_several_experiments_are_one_run(no_vega, wandb, tmp_path):
    for n, name in enumerate(("Night / shift", "day")):
        made = result(experiment_signature=f"0000000{n}")
        made["config"]["name"] = name
        put(tmp_path / name.split()[0], made)
    handed_over([tmp_path], tmp_path)
    assert wandb.given()["name"] == "compare_night-shift_and_1_more"
    assert [key for key in wandb.summary_given() if key.startswith("verdict")] == ["verdict/1", "verdict/2"]


def test_runs_that_do_not_lie_here_go_to_the_default_outputs(no_vega, wandb, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for arm in ("fp32", "bf16"):
        put(tmp_path / arm, arm=arm)
    found = read([tmp_path])
    for made in found.runs:
        object.__setattr__(made, "folder", f"wandb:team/project/{made.arm}")
    comparisons = compare(found)
    sections = sections_of(comparisons)
    asked = compose(["wandb.mode=offline", f"paths.outputs={tmp_path}/mine"])
    assert hand_over(comparisons, found, sections, "page", asked, []).startswith(f"{tmp_path}/mine/wandb, run compare_")


def test_no_secret_goes_there(no_vega, wandb, tmp_path):
    folder = tmp_path / SECRET / "runs"
    for arm in ("fp32", "bf16"):
        made = result(arm)
        made["config"]["name"] = f"a name that is rather long, night {SECRET}"
        log(put(folder / arm, made), [2.0, 1.0])
    (folder / "gone").mkdir()
    (folder / "gone" / "result.json").write_text("{")
    said, _, text = handed_over([folder], tmp_path, [SECRET])
    assert SECRET in text
    assert SECRET in said  # the user's own folder, on the user's own terminal
    for name, args, kwargs in wandb.calls:
        given = kwargs | {"dir": ""} if name == "init" else kwargs
        assert SECRET not in f"{args} {given}", name
    assert wandb.given()["name"] == "compare_a-name-that-is-rather-long-night-redacte"


# --- a picture -----------------------------------------------------------------------------------------------


def share(image, colour, box=None):
    """Of the pixels in a part of the image, the share that is of that colour."""
    wanted = tuple(int(colour[n : n + 2], 16) for n in (1, 3, 5))
    return float((numpy.asarray(image.crop(box) if box else image) == wanted).all(axis=-1).mean())


def picture_of(chart):
    drawn = drawing.picture(chart.spec, chart.keys or chart.arms, chart.heading, "below")
    assert drawn.startswith(b"\x89PNG")
    return Image.open(io.BytesIO(drawn)).convert("RGB")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """name -> (chart, its picture), of the first of a fleet's comparisons."""
    comparison = compare(read([fleet(tmp_path_factory.mktemp("fleet"))]))[0]
    made, _ = charts.charts_of(comparison, charts.looks_of([comparison]))
    return {chart.name: (chart, picture_of(chart)) for chart in made}


def test_a_picture_has_a_title_a_legend_of_what_is_drawn_and_the_chart(pictures):
    for chart, image in pictures.values():
        legend = (0, 80, image.width, 160)
        keys = chart.keys or chart.arms
        assert [key.label for key in keys if share(image, key.colour, legend) == 0] == [], chart.name
        colours = {*drawing.COLOURS, *drawing.KIND_COLOURS} - {key.colour for key in keys}
        if keys:
            assert [colour for colour in colours if share(image, colour, legend)] == [], chart.name
        assert share(image, "#000000", (0, 0, image.width, 40)) > 0.001  # the title
        assert share(image, "#ffffff") > 0.5  # on white, in whatever colours W&B is looked at
    assert [key.label for key in pictures["loss_scale"][0].arms] == ["fp16"]
    assert [key.label for key in pictures["validation_loss_difference"][0].arms] == ["bf16", "fp16"]
    assert pictures["speed_ratio"][0].arms == ()  # its axis names them
    assert share(pictures["memory_by_kind"][1], drawing.KIND_COLOURS[2], (0, 160, 1500, 400)) > 0.1


def test_an_entry_that_is_long_takes_a_line_of_the_legend(pictures):
    chart, image = pictures["training_loss"]
    long = [drawing.arm_key(n, f"fp16[fp32_modules={'a' * 80}{n}]") for n in range(6)]
    drawn = drawing.picture(chart.spec, long, chart.heading, "below")
    taller = Image.open(io.BytesIO(drawn)).convert("RGB")
    assert taller.height == image.height + 2 * 20 * 5
    assert taller.width == image.width
    assert all(share(taller, key.colour, (0, 80, taller.width, 360)) > 0 for key in long)


# --- the script ------------------------------------------------------------------------------------------------


def stub(folder, text):
    """A package of that name for the script to find."""
    (folder / "wandb.py").write_text(text)
    return os.pathsep.join([str(folder), str(ROOT / "src")])


def test_without_the_option_wandb_is_not_imported(tmp_path):
    timed(tmp_path / "runs")
    path = stub(tmp_path, "raise SystemExit('imported')\n")
    done = run("compare.py", tmp_path / "runs", PYTHONPATH=path, WANDB_MODE="offline")
    assert (done.returncode, done.stderr) == (0, "")
    assert "in W&B" not in done.stdout


def test_disabled_is_a_contradiction(tmp_path):
    timed(tmp_path / "runs")
    done = run("compare.py", tmp_path / "runs", "--wandb", WANDB_MODE="disabled")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "precision-lab: --wandb and WANDB_MODE=disabled contradict each other; set it to offline or online.\n"
    )
    assert not list(tmp_path.rglob("comparison.*"))


@pytest.mark.parametrize("where", ["init", "log"])
def test_a_server_that_fails_costs_one_line(tmp_path, where):
    timed(tmp_path / "runs")
    plain = run("compare.py", tmp_path / "runs")
    written = {path: path.read_bytes() for path in tmp_path.glob("runs/comparison.*")}
    path = stub(
        tmp_path,
        "Settings = Table = Image = Html = lambda *_, **__: None\n"
        "class Run:\n"
        "    id, url = 'i', 'u'\n"
        "    def define_metric(self, *_, **__): pass\n"
        f"    def log(self, *_): raise ConnectionError('unreachable')\n"
        f"def init(**_):\n    if {where == 'init'}: raise ConnectionError('unreachable')\n    return Run()\n"
        "def teardown(): pass\n",
    )
    done = run("compare.py", tmp_path / "runs", "--wandb", PYTHONPATH=path, WANDB_MODE="online")
    assert (done.returncode, done.stdout) == (0, plain.stdout)
    assert done.stderr == "W&B stopped (ConnectionError: unreachable); nothing else does, the comparison is complete.\n"
    assert {path: path.read_bytes() for path in tmp_path.glob("runs/comparison.*")} == written


@pytest.mark.slow
def test_wandbs_own_files_hold_it_and_a_comparison_of_them_passes_it_over(tmp_path):
    folder = fleet(tmp_path / SECRET / "outputs" / "sweeps" / "night")
    words = ["--wandb", "--html", tmp_path / "report.html", "--price-per-hour", "2"]
    done = run(
        "compare.py", folder, *words, WANDB_MODE="offline", MY_API_KEY=SECRET, WANDB_DATA_DIR=str(tmp_path / "d")
    )
    assert (done.returncode, done.stderr) == (0, "")
    outputs = folder.parents[1]
    ((name, place),) = re.findall(r"^in W&B: (.*), run (compare_night-\w+)$", done.stdout, re.MULTILINE)
    assert name == f"{outputs}/wandb"
    (made,) = outputs.glob(f"wandb/offline-run-*-{place}")
    told = records(made / f"run-{place}.wandb")
    (begun,) = [one["run"] for one in told if one["type"] == "run"]
    assert (begun["job_type"], begun["run_group"], begun["tags"]) == ("compare", "compare", ["fp32", "bf16", "fp16"])
    kept = [one["summary"]["update"] for one in told if one["type"] == "summary"]
    summary = {key: value for update in kept for key, value in update.items()}
    assert (summary["arms.nrows"], summary["runs"], summary["status"]) == (6, 12, "completed")
    assert summary["verdict/2"].startswith("night on Made-up V100: ")
    (table,) = made.glob("files/media/table/*")
    rows = json.loads(table.read_text())
    assert (rows["columns"][0], len(rows["data"])) == ("name", 6)
    assert {f"{n}_{name}" for n in (1, 2) for name in NAMES} == {
        re.sub(r"_\d+_[0-9a-f]+\.png$", "", path.name) for path in made.glob("files/media/images/charts/*.png")
    }
    (shown,) = made.glob("files/media/html/*")
    page_text = (tmp_path / "report.html").read_text()
    assert shown.read_text() == page_text.replace(SECRET, "[redacted]")
    assert len(page_text) > 500_000  # Vega is in it
    artifacts = [one["artifact"] for one in told if one["type"] == "artifact" and one["artifact"]["type"] == "report"]
    assert [one["name"] for one in artifacts] == ["report_night"]
    (entry,) = artifacts[0]["manifest"]["contents"]
    assert (entry["path"], Path(entry["local_path"]).read_text()) == ("report.html", shown.read_text())
    for path in made.rglob("*"):  # but W&B's own log, which says where it lies
        assert path.is_dir() or path.parent.name == "logs" or SECRET.encode() not in path.read_bytes(), path
    again = run("compare.py", f"wandb-offline:{outputs}/wandb", folder, "--into", tmp_path)
    assert again.returncode == 0, again.stderr
    assert "left out" not in again.stdout

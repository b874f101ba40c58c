"""NaN and infinity: kept and shown as what they are, from loop to report, in files that any JSON reader takes."""

import csv
import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from html_pages import Page
from made_up import put, result
from precision_lab import checkpoint, config
from precision_lab.recorder import finite, number_in, storable
from precision_lab.report import files, render
from precision_lab.report.compare import compare
from precision_lab.report.page import page
from precision_lab.report.read import read
from precision_lab.sweep.plan import Job
from precision_lab.sweep.view import figures, sentence
from test_resume import attempt

NAN, INF = float("nan"), float("inf")
LOST = ["precision=fp32", "optimizer=sgd", "optimizer.lr=1e38", "trainer.grad_clip=null"]


def strict(text: str):
    """What a reader of plain JSON makes of it: one that knows no NaN."""

    def no_json(word: str):
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=no_json)


@pytest.mark.parametrize("value", [NAN, INF, -INF, 0.0, -1.5, 1e308, 5])
def test_a_number_that_was_stored_comes_back(value):
    stored = strict(json.dumps(finite({"a": value, "b": 1.0}), allow_nan=False))
    assert str(number_in(stored, "a")) == str(float(value))
    assert stored.get("nonfinite") == (None if math.isfinite(value) else {"a": str(value)})


@pytest.mark.parametrize(
    "values", [{}, {"a": None}, {"a": "nan"}, {"a": True}, {"a": [1]}, {"a": 10**400}, {"a": None, "nonfinite": ["a"]}]
)
def test_what_is_no_number_is_none(values):
    assert number_in(values, "a") is None


def test_a_number_anywhere_in_a_file_is_text_where_json_has_none():
    assert storable({"a": [NAN, (INF, 1.0)], "b": {"c": -INF}}) == {"a": ["nan", ["inf", 1.0]], "b": {"c": "-inf"}}


@pytest.fixture(scope="module")
def lost(tmp_path_factory):
    """A real run whose weights grow beyond float32."""
    return attempt(tmp_path_factory.mktemp("lost") / "outputs", *LOST)


def test_every_file_of_a_run_that_lost_its_loss_is_plain_json(lost):
    assert lost.status == "diverged", lost.said
    texts = {path.name: path.read_text() for path in lost.folder.rglob("*.json*")}
    assert {"metrics.jsonl", "result.json", "status.json", "environment.json"} <= set(texts)
    for name, text in texts.items():
        for part in text.splitlines() if name.endswith("l") else [text]:
            strict(part)


def test_its_loss_is_in_the_files_as_what_it_was(lost):
    lines = [json.loads(line) for line in (lost.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["train/step"] for line in lines] == [2, 4, 5, 6, 8]
    assert math.isnan(number_in(lines[-1], "train/loss"))
    assert lines[-1]["train/loss"] is None
    summary = lost.result["summary"]
    assert math.isnan(number_in(summary, "final/val_loss_fp32"))
    assert summary["nonfinite"]["final/val_loss_fp32"] == "nan"
    assert lost.result["curve"]["step"] == [5, 8]
    assert lost.result["curve"]["val_loss_fp32"][-1] is None


def test_it_is_told_as_nan_at_the_end(lost):
    assert "the validation loss is nan after step 8" in lost.said
    assert "val loss nan (in fp32 nan)" in lost.said


def test_it_is_shown_as_nan_in_a_sweeps_table(lost):
    asked = config.compose(["model=mlp", "precision=fp32"])
    ended = Job(["seed=0"], "seed=0", asked, lost.folder, status="diverged")
    known = figures(ended)
    assert (known["train_loss"], known["val_loss"], known["step"]) == ("nan", "nan", "8")
    assert sentence(ended).startswith("diverged: step 8")
    assert "val loss nan" in sentence(ended)
    pid = json.loads((lost.folder / "status.json").read_text())["pid"]
    running = Job(["seed=0"], "seed=0", asked, lost.folder, status="running", pid=pid)
    known = figures(running)
    assert (known["train_loss"], known["val_loss"], known["step"].split("/")[0]) == ("nan", "nan", "8")


def test_a_checkpoint_keeps_readings_that_are_not_recorded_yet(tmp_path):
    kept = checkpoint.Checkpoints(tmp_path, None, None)
    path = kept.write(3, {"trainer": {"unlogged": {"train/loss": NAN, "train/grad_norm": INF}}}, [])
    unlogged = checkpoint.read(path)["trainer"]["unlogged"]
    assert math.isnan(unlogged["train/loss"])
    assert unlogged["train/grad_norm"] == INF


# --- the report ------------------------------------------------------------------------------------


@pytest.fixture
def with_a_nan(tmp_path, no_vega):
    """Made-up results: completed runs of which one arm's own validation loss is infinite and its accuracy NaN."""
    for arm in ("fp32", "bf16"):
        for seed in range(3):
            made = result(arm, seed)
            if (arm, seed) == ("bf16", 1):
                made["summary"] |= {"final/val_accuracy": None, "final/val_loss": None}
                made["summary"]["nonfinite"] = {"final/val_accuracy": "nan", "final/val_loss": "inf"}
                made["curve"]["val_loss_fp32"] = [None, 0.5]
            made["config"]["model"]["ceiling"] = "inf"  # as a run stores what it was given
            folder = put(tmp_path / f"{arm}-{seed}", made)
            lines = [{"train/step": 1, **finite({"train/loss": NAN})}, {"train/step": 2, "train/loss": 1.0}]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = read([tmp_path])
    assert found.skipped == []
    return compare(found), found


def test_a_comparison_shows_it_and_forms_no_mean_without_it(with_a_nan):
    comparisons, found = with_a_nan
    told = strict(files.as_json(comparisons, found))
    arms = {one["arm"]: one["figures"] for one in told["comparisons"][0]["arms"]}
    assert arms["bf16"]["val_accuracy"] == {"n": 3, **dict.fromkeys(("mean", "sd", "median", "low", "high"), "nan")}
    assert arms["bf16"]["val_loss"]["mean"] == "inf"
    assert arms["fp32"]["val_accuracy"]["mean"] == 0.75
    (row,) = [row for row in csv.DictReader(io.StringIO(files.as_csv(comparisons))) if row["arm"] == "bf16"]
    assert (row["val_accuracy_mean"], row["val_loss_mean"], row["val_accuracy_n"]) == ("nan", "inf", "3")
    text = io.StringIO()
    render.show(comparisons, found, Console(file=text, width=200))
    (line,) = [one for one in text.getvalue().splitlines() if one.startswith("bf16") and " nan" in one]
    assert line.count("nan") == 1
    assert "| nan |" in files.markdown(comparisons, found)


def test_the_pages_own_json_is_plain(with_a_nan):
    comparisons, found = with_a_nan
    text = page(comparisons, found)
    scripts = Page(text).texts("script", id="specs")
    assert len(scripts) == 1
    assert strict(scripts[0])
    assert "nan" in [cell for _, _, rows in Page(text).tables() for row in rows for cell in row]


def test_damaged_log_lines_do_not_reach_the_page(with_a_nan, tmp_path):
    for folder in Path(tmp_path).glob("bf16-*"):
        (folder / "metrics.jsonl").write_text('{"train/step": 1, "train/loss": 1e999}\n')
    comparisons, found = with_a_nan
    assert strict(Page(page(comparisons, found)).texts("script", id="specs")[0])

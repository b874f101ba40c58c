"""Runs of an emulated arm in a comparison: their losses count, their times and memory are no figures of anybody's."""

import csv
import io
import json

import pytest

from made_up import benchmark, put, put_benchmark, result
from precision_lab.errors import InputError
from precision_lab.report import drawing, files
from precision_lab.report.charts import charts_of
from precision_lab.report.compare import OF_THE_MACHINE, compare
from precision_lab.report.loss import losses_of, reaches_of
from precision_lab.report.page import page
from precision_lab.report.read import read
from precision_lab.report.render import blocks, cells_of
from precision_lab.report.verdict import verdict_of

EMULATED = "fp16[emulate=cuda]"
CURVE = {"step": [50, 100, 150, 200], "val_loss_fp32": [2.0, 1.0, 0.7, 0.5]}
SECONDS = {"train_s": [43210.0, 43211.0, 43212.0, 54321.0]}
FAST = {"step_ms_p50": 0.5, "peak_allocated_gib": 1.0, "saved_activations_mib": 10.0}  # so good that it would be used


def compared(folder, arms=("fp32", "bf16", EMULATED), **changes):
    for arm in arms:
        for seed in range(6):
            loss = 0.5 + 0.01 * seed + (1e-5 * (-1) ** seed if arm != "fp32" else 0)
            curve = CURVE | (SECONDS if arm == EMULATED else {"train_s": [0.1, 0.2, 0.3, 0.4]})
            own = {**FAST, **changes} if arm == EMULATED else {}
            words = ["model=mlp", f"precision={arm.partition('[')[0]}", f"seed={seed}"]
            words += ["precision.emulate=cuda"] if arm == EMULATED else []
            put(
                folder / f"{arm}{seed}",
                result(arm, seed, **{"val_loss_fp32": loss, "overrides": words, "curve": curve} | own),
            )
    found = read([folder])
    return compare(found)[0], found


def row_of(comparison, arm=EMULATED):
    return next(row for row in comparison.rows if row.arm == arm)


def test_the_loss_is_compared_and_nothing_else(tmp_path):
    comparison, found = compared(tmp_path)
    row, native = row_of(comparison), row_of(comparison, "bf16")
    assert set(row.against) == {"loss_difference"} < set(native.against)
    assert not set(row.figures) & set(OF_THE_MACHINE)
    assert set(OF_THE_MACHINE) < set(native.figures)
    assert row.memory is None
    assert losses_of(comparison)[EMULATED].word == "equivalent"
    assert reaches_of(comparison)[EMULATED].steps == 200
    (line,) = [one for one in csv.DictReader(io.StringIO(files.as_csv([comparison]))) if one["arm"] == EMULATED]
    assert line["speed_ratio"] == line["step_ms_median"] == line["peak_ratio"] == line["target_train_s"] == ""
    assert line["target_steps"] == "200"
    assert line["warnings"].split().count("emulated_target") == 1
    (told,) = [arm for arm in json.loads(files.as_json([comparison], found))["comparisons"][0]["arms"]][2:]
    assert (told["arm"], told["memory"], told["timing"]) == (EMULATED, None, None)


def test_tables_and_page_show_no_time_and_no_memory(tmp_path):
    comparison, found = compared(tmp_path)
    speed, memory, loss = (dict(zip(header, rows[2], strict=True)) for header, rows in cells(comparison))
    assert speed == {
        "arm": EMULATED, "runs": "6 completed", "ms/step (range)": "emulated", "samples/s": "-", "speed ratio": "-",
    }  # fmt: skip
    assert [memory[key] for key in ("peak GiB", "ratio", "saved MiB")] == ["-", "-", "-"]
    assert loss["to target"] == "200"
    looks = {row.arm: drawing.arm_key(n, row.arm) for n, row in enumerate(comparison.rows)}
    charts, _ = charts_of(comparison, looks)
    for chart in charts:
        if chart.heading.startswith(("Speed", "Memory")):
            assert EMULATED not in json.dumps([chart.cells, chart.caption])
    shown = json.dumps([chart.cells for chart in charts]) + files.markdown([comparison], found)
    assert not any(seconds in shown for seconds in ("43210", "43,210", "54321", "54,321"))


def cells(comparison):
    return [cells_of(columns, comparison.rows) for columns in blocks(comparison)]


def test_a_price_is_not_put_on_emulated_seconds(tmp_path, no_vega):
    comparison, found = compared(tmp_path)
    text = page([comparison], found, 2.5)
    assert not any(seconds in text for seconds in ("43210", "43,210", "54321", "54,321"))
    assert "(cuda)" in text


@pytest.mark.parametrize("loss", [0.3, 0.5])
def test_it_is_never_recommended(tmp_path, loss):
    comparison, _ = compared(tmp_path, arms=("fp32", EMULATED), val_loss_fp32=loss)
    found = verdict_of(comparison)
    assert found.headline == "Stay with fp32 here."
    assert "is emulated, so nothing is known of its speed and memory; its validation loss is" in found.sentences[0]
    assert "emulate" not in found.command


def test_it_is_not_recommended_where_the_reference_does_not_fit(tmp_path):
    put(tmp_path / "lost", result("fp32", status="out_of_memory", reason="out of memory", finished=2.0))
    put(tmp_path / "a", result(EMULATED, **FAST))
    (comparison,) = compare(read([tmp_path]))
    assert "Use" not in verdict_of(comparison).headline


def test_it_is_no_reference(tmp_path):
    compared(tmp_path)
    with pytest.raises(InputError, match=r"^--reference fp16\[emulate=cuda\] is emulated, so its runs have no times"):
        compare(read([tmp_path]), EMULATED)


def test_the_native_arm_s_benchmark_is_not_taken_for_the_emulated_one_s(tmp_path):
    put_benchmark(tmp_path / "bench", benchmark(fp16=(1.5, 1.48, 1.52)))
    comparison, _ = compared(tmp_path, arms=("fp32", "fp16", EMULATED))
    assert row_of(comparison, "fp16").timing is not None
    assert row_of(comparison).timing is None


def test_results_from_before_there_was_emulation_stand_beside_those_from_after(tmp_path):
    """The fields that were added are absent there, and null or empty here: one arm all the same."""
    put_benchmark(tmp_path / "bench", benchmark(bf16=(1.5, 1.48, 1.52)))
    for seed in range(2):
        for arm in ("fp32", "bf16"):
            made = result(arm, seed)
            if seed:
                made["config"]["precision"] |= {"fp32_ops": [], "emulate": None}
            put(tmp_path / f"{arm}{seed}", made)
    (comparison,) = compare(read([tmp_path]))
    assert [(row.arm, len(row.counted)) for row in comparison.rows] == [("fp32", 2), ("bf16", 2)]
    assert comparison.rows[1].timing is not None

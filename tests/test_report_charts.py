"""The charts of the report page: what each says, its table and its caption. Not how it is drawn."""

import pytest

from html_pages import fleet, log, written
from made_up import H100, V100, benchmark, column, put, put_benchmark, result
from precision_lab.ratios import MARGIN
from precision_lab.report import curves, drawing

pytestmark = pytest.mark.usefixtures("no_vega")


def chart(shown, heading):
    """(its specification, its table, its caption) of the first comparison."""
    headings = shown.texts("h4")
    place = headings.index(heading)
    tables = [one for one in shown.tables() if one[0] in headings]
    return shown.specs()[f"comparison1-chart{place + 1}"], tables[place], shown.texts("figcaption")[place]


def test_a_curve_is_the_mean_over_seeds_with_a_band_and_a_diverged_run_is_a_line_of_its_own(of_fleet):
    shown, _ = of_fleet
    spec, (_, header, rows), caption = chart(shown, "Validation loss")
    points = [point for point in spec["datasets"]["values"] if point["line"] == "line0"]
    assert points == [
        {"line": "line0", "step": 50, "mean": 2.5, "low": 2.0, "high": 3.0},
        {"line": "line0", "step": 100, "mean": 1.0, "low": 1.0, "high": 1.0},
        {"line": "line0", "step": 200, "mean": 0.5, "low": 0.5, "high": 0.5},
    ]
    assert header == ["step", "fp32", "bf16", "fp16", "fp16, seed 1, diverged"]
    assert rows == [
        ["50", "2.5 (2 to 3)", "2.5 (2 to 3)", "2", "3"], ["100", "1", "1", "1", "-"],
        ["200", "0.5", "0.51", "0.52", "-"],
    ]  # fmt: skip
    assert spec["datasets"]["ends"] == [{"line": "line3", "step": 50, "mean": 3.0}]
    assert "At step 200: fp32 0.5, bf16 0.51 (2 runs each). At step 200: fp16 0.52 (1 run)." in caption
    told = spec["datasets"]["told"]
    assert [row["step"] for row in told] == [50, 100, 200]
    assert [told[0][name] for name in ("line0", "line2", "line3")] == ["2.5 (2 to 3)", "2", "3"]
    assert [(row["from"], row["to"]) for row in told] == [(49, 75), (75, 150), (150, 200)]


def test_the_difference_from_the_reference_is_formed_seed_by_seed(tmp_path):
    for seed in (0, 1):
        for arm, apart in (("fp32", 0.0), ("bf16", 0.125 * (1 + seed))):
            made = result(arm, seed, H100)
            made["curve"]["val_loss_fp32"] = [5.0 * (1 + seed) + apart, 4.0]
            put(tmp_path / f"{arm}{seed}", made)
    _, (_, header, rows), _ = chart(written(tmp_path)[0], "Validation loss minus fp32's")
    assert header == ["step", "bf16"]
    assert rows == [["100", "+0.19 (+0.12 to +0.25)"], ["200", "+0"]]


def test_training_loss_scale_and_skipped_steps_are_of_the_logs(of_fleet):
    shown, _ = of_fleet
    _, (_, header, rows), _ = chart(shown, "Training loss")
    assert header == ["step", "fp32", "bf16", "fp16", "fp16, seed 1, diverged"]
    assert rows[0] == ["1", "2.5 (2 to 3)", "2.5 (2 to 3)", "2", "3"]
    spec, (_, header, rows), _ = chart(shown, "Loss scale")
    assert header == ["step", "fp16", "fp16, seed 1, diverged"]  # the arm with a scaler
    assert [row[1] for row in rows] == ["65,536", "32,768", "16,384"]
    assert spec["layer"][1]["encoding"]["y"]["scale"]["type"] == "log"
    assert [row[1] for row in chart(shown, "Skipped steps")[1][2]] == ["0", "1", "2"]


def test_a_long_log_is_thinned_and_keeps_its_ends(tmp_path):
    log(put(tmp_path / "0"), [1.0 + step for step in range(1000)])
    _, (_, _, rows), _ = chart(written(tmp_path)[0], "Training loss")
    assert len(rows) == curves.POINTS
    assert (rows[0], rows[-1]) == (["1", "1"], ["1000", "1,000"])


def test_a_log_that_is_missing_or_damaged_is_left_out_and_named(tmp_path):
    for arm, text in (("fp32", '{"train/step": 1, "train/loss": 2.0}\n'), ("bf16", '{"train/st'), ("fp16", None)):
        folder = put(tmp_path / arm, arm=arm)
        if text:
            (folder / "metrics.jsonl").write_text(text)
    shown, _ = written(tmp_path)
    assert chart(shown, "Training loss")[1][1] == ["step", "fp32"]
    assert f"Not in the charts: metrics.jsonl is damaged: {tmp_path}/bf16." in shown.texts("p")
    missing = f"Not in the charts: metrics.jsonl cannot be read (No such file or directory): {tmp_path}/fp16."
    assert missing in shown.texts("p")


def test_a_ratio_timed_in_turn_is_called_a_hint(of_fleet):
    spec, (_, header, rows), caption = chart(of_fleet[0], "Speed ratio to fp32")
    assert header == ["arm", "how", "verdict", "speed ratio", "from", "to", "pairs"]
    assert rows[0] == ["bf16", "timed in turn, a hint only", "-", "2.00", "2.00", "2.00", "2"]
    assert rows[1] == ["fp16", "timed in turn, a hint only", "-", "2.11", "-", "-", "1"]
    assert caption.endswith("Timed in turn, a hint only: bf16 2.00 [2.00, 2.00]; fp16 2.11.")  # and of no benchmark
    assert spec["datasets"]["values"][0]["value"] == pytest.approx(2.0)
    assert spec["datasets"]["margin"] == [{"value": 1 - MARGIN, "high": 1 + MARGIN}]
    assert spec["datasets"]["even"] == [{"value": 1}]


def test_ratios_of_a_benchmark_stand_with_their_words(tmp_path):
    fleet(tmp_path)
    made = benchmark(H100, bf16=(1.482, 1.47, 1.495), fp16=(1.01, 0.9, 1.2))
    again = column("fp32", (1.0, 0.99, 1.01), again=True, with_data=True)
    made["columns"] += [column("fp32", None, with_data=True), again, column("bf16", (1.1, 1.05, 1.15), with_data=True)]
    put_benchmark(tmp_path / "benchmark", made)
    spec, (_, _, rows), caption = chart(written(tmp_path)[0], "Speed ratio to fp32")
    assert rows == [
        ["bf16, computing alone", "timed in alternation", "faster", "1.482", "1.470", "1.495", "120"],
        ["bf16, end to end", "timed in alternation", "faster", "1.100", "1.050", "1.150", "120"],
        ["fp16, computing alone", "timed in alternation", "not resolved", "1.010", "0.900", "1.200", "120"],
    ]
    assert "hint" not in caption
    assert caption.endswith(
        " Timed in alternation by scripts/benchmark.py. On this Made-up H100: 120 pairs of blocks of 5 steps in 10 "
        "sittings in one process, 30 s; ended when every interval was within 1.00% of its ratio. Noise floor, fp32 "
        "beside itself with a 99 % interval, which has to hold 1: computing alone 1.000 [0.995, 1.005]; end to end "
        "1.000 [0.990, 1.010]."
    )
    drawn = [(one["value"], one["low"], one["high"]) for one in spec["datasets"]["values"]]
    assert drawn == [(1.482, 1.47, 1.495), (1.1, 1.05, 1.15), (1.01, 0.9, 1.2)]


def test_memory_is_stacked_by_kind_with_the_phase_of_the_peak(tmp_path):
    made = result("bf16", machine=H100)
    made["memory"] |= {"phase": "optimizer", "by_kind": {"parameters": 2**30, "gradients": 2**29, "batch": 0}}
    put(tmp_path / "bf16", made)
    put(tmp_path / "fp32", machine=H100)
    spec, (_, header, rows), caption = chart(written(tmp_path)[0], "Memory at the peak, by kind")
    assert header == [
        "arm", "phase of the peak", "peak GiB", "parameters", "gradients", "optimizer state", "saved activations",
        "batch", "temporaries",
    ]  # fmt: skip
    assert rows == [
        ["fp32", "backward pass", "4", "1", "0.5", "2", "0.25", "0.0625", "0.1875"],
        ["bf16", "optimizer step", "1.5", "1", "0.5", "0", "0", "0", "0"],
    ]
    assert "fp32 4 GiB, in the backward pass; bf16 1.5 GiB, in the optimizer step." in caption
    parts = [part for part in spec["datasets"]["values"] if part["arm"] == "fp32"]
    assert [(part["start"], part["end"]) for part in parts[:3]] == [(0, 1), (1, 1.5), (1.5, 3.5)]
    assert [part["number"] for part in parts] == ["1", "2", "3", "4", "", ""]  # the last two are too short for one


def test_an_arm_keeps_its_colour_dash_and_shape_in_all_charts(of_fleet):
    shown, _ = of_fleet
    of_lines = chart(shown, "Training loss")[0]["layer"][1]["encoding"]
    of_scale = chart(shown, "Loss scale")[0]["layer"][1]["encoding"]
    of_speed = chart(shown, "Speed ratio to fp32")[0]["layer"][-1]["encoding"]
    colours = of_lines["color"]["scale"]["range"]
    assert len(set(colours[:3])) == 3
    assert of_speed["color"]["scale"]["range"] == colours[1:3]
    assert of_scale["color"]["scale"]["range"] == [colours[2]] * 2
    dashes = of_lines["strokeDash"]["scale"]["range"]
    assert len(set(map(tuple, dashes[:3]))) == 3
    legend = [one[1]["stroke"] for one in shown.all("line")]
    assert legend == colours[:3] * 2


def test_an_arm_has_one_colour_on_all_hardware(tmp_path):
    for arm, machine in (("fp32", H100), ("tf32", H100), ("bf16", H100), ("fp32", V100), ("bf16", V100)):
        put(tmp_path / f"{arm}-{machine['model']}", result(arm, machine=machine))
    shown, _ = written(tmp_path)
    names = [
        name for ul in shown.texts("ul", class_="legend") for name in ul.split() if name in ("fp32", "tf32", "bf16")
    ]
    colours = [one[1]["stroke"] for one in shown.all("line")]
    assert names == ["fp32", "tf32", "bf16", "fp32", "bf16"]
    assert (colours[0], colours[2]) == (colours[3], colours[4])
    drawn = [spec["layer"][1]["encoding"]["color"]["scale"]["range"] for spec in shown.specs().values()
             if spec["datasets"].get("told") and len(spec["datasets"]["values"]) > 4]  # fmt: skip
    assert drawn[0] == colours[:3]


def test_more_arms_than_colours_still_look_different():
    looks = {(key.colour, key.dash, key.shape) for key in (drawing.arm_key(n, "") for n in range(30))}
    assert len(looks) == 30

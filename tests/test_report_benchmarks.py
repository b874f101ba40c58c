"""benchmark.json read, joined with a comparison and shown; results are made up."""

import csv
import io
import json

import pytest
from rich.console import Console

from made_up import H100, benchmark, column, put, put_benchmark, result
from precision_lab.report import files, timing
from precision_lab.report.benchmarks import load
from precision_lab.report.compare import compare
from precision_lab.report.read import read
from precision_lab.report.reading import reading
from precision_lab.report.warnings import warnings_of

FASTER, SAME, OPEN = (1.5, 1.48, 1.52), (1.0, 0.99, 1.01), (1.04, 1.0, 1.08)


def loaded(folder, made):
    found, problem = load(str(put_benchmark(folder, made)))
    assert problem == ""
    return found


def joined_with_runs(folder, *made, seeds=(0, 1), **words):
    for arm in ("fp32", "bf16"):
        for seed in seeds:
            put(folder / f"{arm}{seed}", result(arm, seed, H100, step_ms_p50=1.0 if arm == "bf16" else 3.0))
    for number, one in enumerate(made):
        put_benchmark(folder / "benchmarks" / str(number), one)
    return compare(read([folder]), **words)[0]


def test_its_ratio_takes_the_place_of_the_runs_own(tmp_path):
    (row,) = joined_with_runs(tmp_path, benchmark(H100, bf16=FASTER)).others
    speed = row.against["speed_ratio"]
    assert (speed.mean, speed.low, speed.high, speed.pairs) == (1.5, 1.48, 1.52, 120)
    assert row.timing.ratio.word == "faster"
    assert (row.timing.end_to_end, row.timing.compiled, row.timing.busy_share) == (None, None, None)


def test_with_a_loader_the_ratio_that_a_run_feels_stands_in_the_table(tmp_path):
    made = benchmark(H100, bf16=FASTER)
    made["columns"] += [
        column("fp32", None, with_data=True), column("fp32", SAME, again=True, with_data=True),
        column("bf16", OPEN, with_data=True), column("bf16", (2.0, 1.9, 2.1), compiled=True),
    ]  # fmt: skip
    made["arms"]["bf16"] |= {"data_share": {"value": 0.4, "low": 0.3, "high": 0.5}, "joules_per_sample": [0.01, 0.03]}
    comparison = joined_with_runs(tmp_path, made)
    (row,) = comparison.others
    assert row.against["speed_ratio"].mean == 1.04
    assert (row.timing.ratio.value, row.timing.felt.value, row.timing.data_share) == (1.5, 1.04, 0.4)
    assert row.timing.joules_per_sample == 0.02
    assert row.timing.compiled is None  # no second copy of the reference was timed compiled
    assert "timed in alternation, bf16 ran at 1.04 [1.00, 1.08] times the speed of fp32" in reading(comparison)[0]


def test_the_newest_that_is_to_be_trusted_counts(tmp_path):
    old, new = (benchmark(H100, bf16=ratio) | {"finished": when} for ratio, when in ((FASTER, 1.0), (SAME, 2.0)))
    untrusted = benchmark(H100, floor=(1.02, 1.01, 1.03), bf16=OPEN) | {"finished": 3.0}
    assert joined_with_runs(tmp_path, new, old, untrusted).others[0].timing.ratio.value == 1.0
    assert joined_with_runs(tmp_path / "untrusted", untrusted).others[0].timing is None


def test_a_noise_floor_that_fails_with_the_loader_leaves_no_verdict_on_what_a_run_feels(tmp_path):
    made = benchmark(H100, bf16=FASTER)
    made["columns"] += [
        column("fp32", None, with_data=True), column("fp32", (1.05, 1.02, 1.08), again=True, with_data=True),
        column("bf16", FASTER, with_data=True),
    ]  # fmt: skip
    comparison = joined_with_runs(tmp_path, made)
    assert comparison.others[0].timing is None
    assert {"timed_in_turn", "benchmark_floor"} <= dict(warnings_of(comparison)).keys()


def test_runs_of_a_compiled_experiment_are_judged_by_compiled_steps(tmp_path):
    made = benchmark(H100, bf16=FASTER)
    made["config"] = made["config"] | {"device": {"type": "auto", "threads": None, "compile": True}}
    assert joined_with_runs(tmp_path / "eager", made).others[0].timing is None
    made["columns"] += [
        column("fp32", None, compiled=True), column("fp32", SAME, again=True, compiled=True),
        column("bf16", OPEN, compiled=True),
    ]  # fmt: skip
    (row,) = joined_with_runs(tmp_path / "both", made).others
    assert (row.timing.ratio.value, row.timing.compiled) == (1.04, None)


def test_an_arm_is_known_by_its_whole_precision_group_and_so_is_the_reference(tmp_path):
    changed = benchmark(H100, bf16=FASTER)
    changed["arms"]["bf16"]["precision"]["init_scale"] = 1.0
    assert joined_with_runs(tmp_path / "arm", changed).others[0].timing is None
    assert joined_with_runs(tmp_path / "base", changed, reference="bf16").others[0].timing is None


def test_beside_another_reference_the_ratio_is_formed_anew_from_the_rounds(tmp_path):
    made = benchmark(H100, bf16=FASTER)
    (row,) = joined_with_runs(tmp_path, made, reference="bf16").others
    assert row.arm == "fp32"
    assert row.timing.ratio.value == pytest.approx(1 / 1.5)
    assert row.timing.ratio.pairs == 20


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "benchmark.json is damaged: no JSON"),
        ("[]", "benchmark.json is damaged: no object"),
        ('{"schema": 99}', "written by a newer version (schema 99; this one reads up to 1)"),
        ('{"schema": 1}', "benchmark.json is damaged, or of an older version: experiment_signature is missing"),
    ],
)
def test_a_damaged_one_is_named(tmp_path, text, reason):
    put_benchmark(tmp_path / "one", {})
    (tmp_path / "one" / "benchmark.json").write_text(text)
    ((folder, told),) = read([tmp_path]).skipped
    assert folder.endswith("one")
    assert told.startswith(reason)


@pytest.mark.parametrize("key", [key for key in benchmark(bf16=FASTER) if key not in ("note", "git", "name", "energy")])
@pytest.mark.parametrize("value", [None, [], {"a": {}}, "x"])
def test_a_value_of_a_wrong_type_is_named_and_never_fatal(tmp_path, key, value):
    put_benchmark(tmp_path / "bad", benchmark(bf16=FASTER) | {key: value})
    found = read([tmp_path])
    assert (len(found.benchmarks), len(found.skipped)) in ((0, 1), (1, 0))
    for one in found.benchmarks:
        timing.show(one, Console(file=io.StringIO()))


@pytest.mark.parametrize(
    ("place", "key", "value"),
    [
        ("arms", "compile_s", "x"), ("arms", "data_share", {"value": 0.1}), ("arms", "joules_per_sample", ["x"]),
        ("columns", "busy_share", "x"), ("columns", "over_eager", {"value": "x", "low": 1, "high": 1, "pairs": 9}),
    ],
)  # fmt: skip
def test_a_figure_that_only_a_sentence_tells_is_checked_too(tmp_path, place, key, value):
    made = benchmark(bf16=FASTER)
    made[place][0 if place == "columns" else "fp32"][key] = value
    put_benchmark(tmp_path / "bad", made)
    found = read([tmp_path])
    assert [reason for _, reason in found.skipped] == ["benchmark.json is damaged: it holds values of a wrong type"]


@pytest.mark.parametrize("times", [[[0.1]], [[0.1, 0.0]] * 10, [["x"]] * 10, None, [[0.1, -1.0]] * 10])
def test_times_that_are_none_are_named(tmp_path, times):
    made = benchmark(bf16=FASTER)
    made["columns"][-1]["seconds_a_step"] = times
    put_benchmark(tmp_path / "bad", made)
    assert read([tmp_path]).skipped[0][1] == "benchmark.json is damaged: it holds values of a wrong type"


@pytest.mark.parametrize("change", [{"pairs": 0}, {"low": -1}, {"value": "x"}, {"high": None}, {"more": 1}])
def test_a_ratio_that_is_none_is_named(tmp_path, change):
    made = benchmark(bf16=FASTER)
    made["columns"][-1]["ratio"] |= change
    put_benchmark(tmp_path / "bad", made)
    assert read([tmp_path]).skipped[0][1] == "benchmark.json is damaged: it holds values of a wrong type"


def shown(folder, made, columns=80):
    console = Console(file=io.StringIO(), width=columns)
    timing.show(loaded(folder, made), console)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= columns
    return [line.rstrip() for line in lines], " ".join(console.file.getvalue().split())


def test_the_table_gives_each_arm_its_time_ratio_and_word(tmp_path):
    lines, text = shown(tmp_path / "a", benchmark(bf16=FASTER, fp16=OPEN))
    rows = {line.split("  ")[0]: line.split()[-2:] for line in lines if " to " in line and line[:2] in ("fp", "bf")}
    assert rows == {
        "fp32": ["1", "reference"], "fp32 again": ["noise", "floor"],
        "bf16": ["1.520]", "faster"], "fp16": ["not", "resolved"],
    }  # fmt: skip
    needed = loaded(tmp_path / "b", benchmark(fp16=OPEN)).ratio("fp16").pairs_needed
    assert f"To be resolved at this spread, fp16 computing alone about {needed:,} pairs would be needed" in text
    assert "120 pairs of blocks of 5 steps in 10 sittings in one process, 30 s; ended when every interval was" in text
    assert "Energy: not measured: no CUDA device." in text


def test_without_a_noise_floor_that_holds_1_there_is_no_verdict(tmp_path):
    lines, text = shown(tmp_path / "a", benchmark(floor=(0.97, 0.95, 0.99), bf16=FASTER))
    assert next(line for line in lines if line.startswith("bf16")).endswith("no verdict")
    assert (
        "! No verdict on such steps: the reference arm timed against itself left 1 out (computing alone 0.970" in text
    )


def test_what_a_gpu_says_stands_below(tmp_path):
    made = benchmark(H100, bf16=FASTER)
    for one, share in zip(made["columns"], (0.9, 0.9, 0.4), strict=True):
        one["busy_share"] = share
    share = {"value": 0.3, "low": 0.2, "high": 0.4}
    made["arms"]["fp32"] |= {"joules_per_sample": [0.4, 0.6], "data_share": share, "skipped_steps": 2}
    made["arms"]["bf16"] |= {"without": "out of memory", "compile_s": None}
    made["conditions"]["during"] = {"throttled_by": ["SwThermalSlowdown"], "other_processes": None}
    _, text = shown(tmp_path / "a", made)
    for words in (
        "Kernels run in 90% of fp32's step and 40% of bf16's step. bf16 is launch-bound: the GPU waits for the host",
        "Energy, in J a sample by windows: 0.5 (0.4 to 0.6) for fp32.",
        "Loading data takes 30% [20%, 40%] of fp32's step",
        "bf16 was not timed: out of memory.",
        "! Steps were skipped in timed blocks, and a skipped step may be cheaper: fp32 2.",
        "! While arms were timed: The GPU's clocks were held down: SwThermalSlowdown.",
    ):
        assert words in text


def test_compiled_steps_have_a_table_and_the_time_it_took(tmp_path):
    made = benchmark(bf16=FASTER)
    made["columns"] += [
        column("fp32", None, compiled=True, step_ms=1.0), column("fp32", SAME, again=True, compiled=True),
        column("bf16", OPEN, compiled=True, over_eager={"pairs": 120, "value": 1.4, "low": 1.3, "high": 1.5}),
    ]  # fmt: skip
    made["arms"]["bf16"]["compile_s"] = 12.3
    lines, text = shown(tmp_path / "a", made)
    assert "compiled, computing alone" in lines
    assert "The first compilation took 12.3 s for bf16," in text
    assert "Its steps ran at these multiples of the eager speed: bf16 1.400 [1.300, 1.500]." in text


def test_a_users_own_text_is_no_markup_and_stays_on_its_line(tmp_path):
    made = benchmark(bf16=FASTER) | {"name": "[red]a\nb"}
    lines, _ = shown(tmp_path / "a", json.loads(json.dumps(made)))
    assert lines[0] == "benchmark of [red]a b"


def test_the_files_hold_each_ratio_with_its_word(tmp_path):
    made = benchmark(H100, bf16=FASTER)
    made["columns"] += [
        column("fp32", None, with_data=True), column("fp32", SAME, again=True, with_data=True),
        column("bf16", OPEN, with_data=True),
    ]  # fmt: skip
    comparison = joined_with_runs(tmp_path, made)
    told = {
        arm["arm"]: arm["timing"]
        for arm in json.loads(files.as_json([comparison], read([tmp_path])))["comparisons"][0]["arms"]
    }
    assert told["fp32"] is None
    assert told["bf16"]["ratio"] == {"pairs": 120, "value": 1.5, "low": 1.48, "high": 1.52, "word": "faster"}
    assert (told["bf16"]["end_to_end"]["word"], told["bf16"]["compiled"]) == ("not resolved", None)
    lines = list(csv.DictReader(io.StringIO(files.as_csv([comparison]))))
    assert [line["speed_verdict"] for line in lines] == ["", "not resolved"]

"""What a person reads: tables, sentences, files; and the script that prints and writes them."""

import csv
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from made_up import ARMS, H100, V100, XEON, put, result
from precision_lab.report import files, render
from precision_lab.report.compare import compare
from precision_lab.report.read import read
from precision_lab.report.reading import machine, reading, units
from typed_scripts import run

ROOT = Path(__file__).parents[1]


def fleet(folder):
    """Made-up results on three kinds of hardware: one seed missing, one arm diverged, one job running."""
    for machine_number, hardware in enumerate((H100, V100, XEON)):
        for seed in range(3):
            slow = (1, 3, 200)[machine_number] * (1 + 0.01 * seed)
            put(folder / f"{machine_number}-fp32-{seed}", result("fp32", seed, hardware, step_ms_p50=4.0 * slow))
            low = {"saved_activations_mib": 60.0, "val_loss_fp32": 0.51 + 0.001 * seed}
            made = result("bf16", seed, hardware, step_ms_p50=(2.0, 6.0, 9.0)[machine_number] * slow, **low)
            put(folder / f"{machine_number}-bf16-{seed}", made)
            if machine_number and seed < 2:
                ends = {"status": "diverged", "reason": "loss scale 0.5 fell below precision.min_scale=1 by step 90"}
                made = result(
                    "fp16", seed, hardware, step_ms_p50=2.0 * slow, loss_scale=1024.0, **(ends if seed else {})
                )
                put(folder / f"{machine_number}-fp16-{seed}", made)
    (folder / "running").mkdir()
    (folder / "running" / "status.json").write_text("{}")
    return folder


def shown(folder, width=80, colour=False, **words):
    console = Console(
        file=io.StringIO(),
        width=width,
        highlight=False,
        force_terminal=colour,
        color_system="standard" if colour else None,
    )
    found = read([folder])
    render.show(compare(found, **words), found, console)
    return console.file.getvalue()


def cells(text, header):
    """The rows of the first table whose header begins so, split at two spaces."""
    lines = text.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith(header))
    rows = []
    for line in lines[start + 1 :]:
        if not line.strip():
            break
        rows.append(re.split(r"\s{2,}", line.strip()))
    return rows


def test_a_table_says_what_was_measured_on_what_with_how_many_runs(tmp_path):
    text = shown(fleet(tmp_path))
    lines = text.splitlines()
    assert lines[0] == "night (01234567)"
    assert lines[1] == "Made-up H100, 80 GiB; tf32 native, bfloat16 native, float16 native"
    assert lines[2] == "torch 2.14.1; 200 steps of batch 64"
    assert lines[4] == "No verdict yet on this hardware."  # before any table
    assert cells(text, "arm   runs") == [
        ["fp32", "3 completed", "4.04 (4 to 4.08)", "32,000", "1"],
        ["bf16", "3 completed", "2.02 (2 to 2.04)", "32,000", "2.00 [2.00, 2.00]"],
    ]
    assert cells(text, "arm   peak GiB") == [
        ["fp32", "4", "1", "100", "1", "0", "-"],
        ["bf16", "4", "1.00", "60", "0.60", "0", "-"],
    ]
    assert cells(text, "arm   val loss in fp32") == [
        ["fp32", "0.5", "0", "0", "-", "-"],
        ["bf16", "0.511", "0.001", "+0.011 [+0.0085, +0.013]", "3", "undecided"],
    ]
    assert cells(text, "arm   accuracy") == [["fp32", "0.75"], ["bf16", "0.75"]]
    # an arm of which one run diverged: its statuses, the figures of the other
    assert ["fp16", "1 completed, 1 diverged"] in [row[:2] for row in cells(text.partition("V100")[2], "arm   runs")]


def test_arms_across_hardware_stand_in_one_table(tmp_path):
    text = shown(fleet(tmp_path)).partition("night (01234567) across hardware")[2]
    assert cells(text, "hardware") == [
        ["Made-up H100, 80 GiB", "4.04", "2.02 (2.00)", "-"],
        ["Made-up V100, 16 GiB", "12.12", "18.18 (0.67)", "6 (2.00)"],
        ["2-core Made-up Xeon, threads 1, 8 GiB", "808", "1,818 (0.44)", "400 (2.00)"],
    ]
    assert "validation loss in fp32" in text


def test_other_experiments_are_told_apart_by_their_keys(tmp_path):
    put(tmp_path / "0")
    other = result(experiment_signature="99999999")
    other["config"]["trainer"] |= {"steps": 300, "batch_size": 32}
    put(tmp_path / "1", other)
    text = " ".join(shown(tmp_path).split())
    said = "not comparable with the one above: trainer.steps 200 there, 300 here; trainer.batch_size 64 there, 32 here"
    assert said in text
    assert "across hardware" not in text


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("colour", [False, True])
def test_it_fits_the_terminal_with_and_without_colour_and_cuts_nothing(tmp_path, width, colour):
    fleet(tmp_path)
    reference = "fp16[fp32_modules=blocks.*.norm+head]"
    for seed in (0, 1):
        for n, arm in enumerate(("fp32", "tf32", "bf16_pure", reference)):
            figures = {"peak_allocated_gib": 71.123456 + seed + n, "val_loss_fp32": 12345.678 + 1e-7 * seed * n}
            made = result(
                arm, seed, H100, step_ms_p50=123.456 * (1 + seed + n), loss_scale=2.0 ** (16 + seed), **figures
            )
            put(tmp_path / f"{arm}-{seed}", made)
    text = shown(tmp_path, width, colour, reference=reference)
    assert ("\x1b[" in text) is colour
    plain = re.sub(r"\x1b\[[\d;]*m", "", text)
    lines = plain.splitlines()
    assert max(len(line) for line in lines if not line.startswith("next: python ")) <= width  # that one is copied
    found = read([tmp_path])
    words = {
        word
        for one in compare(found, reference)
        for header, rows in (render.cells_of(columns, one.rows) for columns in render.blocks(one))
        for row in rows
        for word in row[1:]
    }
    for word in words - {"1 completed, 1 diverged"}:  # folded between words
        assert re.search(rf"(^|\s){re.escape(word)}(\s|$)", plain), word
    for row in re.findall(r"^fp16\[fp32_modules=.*$", plain, re.MULTILINE):
        assert row.startswith(reference) or width < 80  # folded there


def test_many_experiments_are_left_to_the_files(tmp_path):
    for number in range(render.SHOWN + 2):
        put(tmp_path / str(number), result(experiment_signature=f"{number:08x}"))
    text = shown(tmp_path)
    assert text.count("torch 2.14.1") == render.SHOWN
    assert "2 more comparisons are in the files; --where chooses among all." in text
    found = read([tmp_path])
    assert files.markdown(compare(found), found).count("\n## ") + 1 == render.SHOWN + 2


def test_control_characters_of_others_reach_no_terminal_and_no_page(tmp_path):
    machine_of = XEON | {"model": "Made-up Xeon"}
    made = result(machine=machine_of, versions={"torch": "2\x1b[31m\n3"})
    put(tmp_path / "0", made)
    other = result(experiment_signature="99999999")
    other["config"]["optimizer"]["note"] = "a\x1bb\nc"
    put(tmp_path / "1", other)
    found = read([tmp_path], ["arm=fp32,<b>*x*"])
    page = files.markdown(compare(found), found)
    assert page.startswith("only runs with arm=fp32,\\<b>\\*x\\*\n")
    for text in (page, shown(tmp_path)):
        assert "\x1b" not in text
        assert "torch 2 [31m 3;" in text.replace("\\", "")


def test_what_was_left_out_is_named_by_reason_and_counted(tmp_path):
    put(tmp_path / "good")
    for number in range(6):
        (tmp_path / f"empty{number}").mkdir()
        (tmp_path / f"empty{number}" / "result.json").touch()
    text = "".join(shown(tmp_path, width=1000).split("\n"))
    assert re.search(r"left out, result.json is empty: \S*empty0, .*empty3 and 2 more", text)


# --- sentences -------------------------------------------------------------------------------------------------


def read_out(folder, made, **words):
    for number, one in enumerate(made):
        put(folder / str(number), one)
    return reading(compare(read([folder]), **words)[0])


def test_the_sentences_of_a_machine_without_units(tmp_path):
    made = []
    for seed in range(3):
        loss = 0.5 + seed
        made.append(result("fp32", seed, step_ms_p50=2.0, val_loss_fp32=loss))
        made.append(result("bf16", seed, step_ms_p50=4.0, saved_activations_mib=60.0, val_loss_fp32=loss))
        made.append(result("fp16", seed, step_ms_p50=400.0, val_loss_fp32=loss + 0.125))
    assert read_out(tmp_path, made) == [
        "On this 2-core Made-up Xeon, which has no bfloat16 and no float16 units, bf16 trained at 0.50 [0.50, 0.50] "
        "times the speed of fp32 and fp16 at 0.005 [0.005, 0.005] (bf16 and fp16: what a machine has no units for, "
        "it converts back and forth).",
        "Of what fp32 keeps for backward, bf16 kept 0.60 and fp16 1.00; of fp32's peak memory, bf16 took 1.00 and fp16 "
        "1.00.",
        *(
            f"{arm} saves no memory here (4,096 against 4,096 MiB), because parameters, gradients and optimizer state, "
            "which autocast leaves as they are, take 3,584 of fp32's 4,096 MiB at the peak, which sits in the backward "
            "pass."
            for arm in ("bf16", "fp16")
        ),
        "After 200 steps of batch 64 the validation loss, computed in float32, was 1.5 for fp32 (sd over 3 seeds 1); a "
        "difference of less than 0.25 % of it counts as none.",
        "bf16 differs by +0 [+0, +0], 90 % interval over 3 pairs of seeds: undecided, since a verdict takes 6 pairs at "
        "least (3 more).",
        "fp16 differs by +0.12 [+0.12, +0.12], 90 % interval over 3 pairs of seeds: undecided, since a verdict takes 6 "
        "pairs at least (3 more).",
    ]


def test_the_sentences_of_a_gpu_that_gains(tmp_path):
    fast = {"step_ms_p50": 15.0, "peak_allocated_gib": 2.0}
    made = [result("fp32", 0, H100, step_ms_p50=30.0), result("bf16", 0, H100, **fast)]
    assert read_out(tmp_path, made) == [
        "On this Made-up H100, which has bfloat16 and float16 units, bf16 trained at 2.00 times the speed of fp32.",
        "Of what fp32 keeps for backward, bf16 kept 1.00; of fp32's peak memory, bf16 took 0.50.",
        "After 200 steps of batch 64 the validation loss, computed in float32, was 0.5 for fp32; a difference of less "
        "than 0.25 % of it counts as none.",
        "bf16 differs by +0: undecided, since a verdict takes 6 pairs at least (5 more).",
    ]


def test_a_short_step_is_named_as_a_likely_reason_of_a_low_precision_that_is_slower_beyond_doubt(tmp_path):
    reason = "(bf16: in a step of 2 ms, casts and dispatch may cost more than the units save)."
    slower = [result("fp32", machine=H100), result("bf16", machine=H100, step_ms_p50=2.5)]
    assert read_out(tmp_path / "short", slower)[0].endswith(reason)
    # fp32 casts nothing
    assert (
        reason
        not in read_out(tmp_path / "turned", [result("bf16"), result("fp32", step_ms_p50=2.5)], reference="bf16")[0]
    )
    doubtful = [result("fp32", seed, H100, step_ms_p50=2 + 0.2 * seed) for seed in range(3)]
    doubtful += [result("bf16", seed, H100, step_ms_p50=2.3 - 0.1 * seed) for seed in range(3)]
    assert reason not in read_out(tmp_path / "doubtful", doubtful)[0]


@pytest.mark.parametrize(
    ("arm", "peak", "said"), [("bf16", 4.0, True), ("bf16", 6.0, False), ("bf16_pure", 4.0, False)]
)
def test_the_reason_for_a_peak_that_hardly_moves_is_given_only_where_it_can_be_the_reason(tmp_path, arm, peak, said):
    made = [result(), result(arm, saved_activations_mib=50.0, peak_allocated_gib=peak)]
    made = [one | {"memory": None} for one in made]
    assert ("since weights, gradients and optimizer state" in read_out(tmp_path, made)[1]) is said


def test_an_arm_whose_speed_the_pairs_do_not_resolve_leaves_the_others_their_say(tmp_path):
    made = [result(arm, seed) for arm in ("fp32", "bf16") for seed in (0, 1)]
    made += [result("fp16", 0, step_ms_p50=1.0), result("fp16", 1, step_ms_p50=90.0)]
    sentence = read_out(tmp_path, made)[0]
    assert (
        "bf16 trained at 1.00 [1.00, 1.00] times the speed of fp32; the speed of fp16 is not resolved by 2 pairs"
        in sentence
    )


def test_runs_that_diverged_are_told_with_their_reason(tmp_path):
    made = [result(), result("fp16", 0, status="diverged", reason="150 non-finite steps in a row"), result("fp16", 1)]
    made.append(result("bf16", status="failed", reason="ValueError: no"))
    assert read_out(tmp_path, made)[-1] == (
        "1 of 1 bf16 runs failed (ValueError: no); 1 of 2 fp16 runs diverged (150 non-finite steps in a row)."
    )


def test_without_a_reference_there_is_nothing_to_say(tmp_path):
    assert read_out(tmp_path, [result("bf16")]) == []


def test_a_machine_s_name_and_its_units():
    assert machine({"device": "cpu", "model": "Intel(R) Xeon(R)  Gold 6130 CPU @ 2.10GHz", "count": 2}) == (
        "2-core Intel Xeon Gold 6130 CPU @ 2.10GHz"
    )
    assert machine({"device": "mps", "model": "Apple M2", "count": 8}) == "Apple M2"
    assert units({"bfloat16": "native", "float16": "emulated"}) == "which has bfloat16 units and no float16 units"
    assert units({"bfloat16": "no", "float16": "native"}) == "which has float16 units and no bfloat16 units"


# --- files -----------------------------------------------------------------------------------------------------


def test_markdown_holds_the_same_tables_sentences_and_warnings(tmp_path):
    found = read([fleet(tmp_path)])
    text = files.markdown(compare(found), found)
    assert "| arm | runs | ms/step (range) | samples/s | speed ratio |\n| --- | --- | ---: |" in text
    assert "| bf16 | 3 completed | 2.02 (2 to 2.04) | 32,000 | 2.00 \\[2.00, 2.00] |" in text
    assert "## night (01234567) across hardware" in text
    assert "- Arms were timed one after the other" in text
    assert re.search(r"- left out, no result yet: still running, or killed: \S+running", text)
    widths = {len(re.findall(r"(?<!\\)\|", line)) for line in text.splitlines() if line.startswith("| arm | runs")}
    assert widths == {6}


def test_a_label_cannot_break_a_markdown_table(tmp_path):
    made = result("fp16[fp32_modules=a|b*]\nc")
    made["config"]["name"] = "a\n## b [x](http://a) &lt;"
    put(tmp_path / "0", made)
    found = read([tmp_path])
    text = files.markdown(compare(found), found)
    assert "| fp16\\[fp32\\_modules=a\\|b\\*] c | 1 completed |" in text
    assert "## a ## b \\[x](http://a) \\&lt; (01234567)\n" in text


def test_csv_has_a_line_an_arm_with_plain_numbers(tmp_path):
    found = read([fleet(tmp_path)])
    lines = list(csv.DictReader(io.StringIO(files.as_csv(compare(found)))))
    assert [(line["model"], line["arm"]) for line in lines][:3] == [
        ("Made-up H100", "fp32"), ("Made-up H100", "bf16"), ("Made-up V100", "fp32")
    ]  # fmt: skip
    assert len(lines) == 8
    assert float(lines[1]["speed_ratio"]) == pytest.approx(2.0)
    assert lines[1]["speed_ratio_pairs"] == "3"
    assert lines[1]["seeds"] == "0-2"
    assert lines[0]["speed_ratio"] == ""
    assert (lines[4]["completed"], lines[4]["diverged"]) == ("1", "1")
    assert "timed_in_turn" in lines[1]["warnings"].split()


def test_json_holds_everything_and_the_folders_it_is_from(tmp_path):
    found = read([fleet(tmp_path)])
    values = json.loads(files.as_json(compare(found), found))
    assert [len(one["arms"]) for one in values["comparisons"]] == [2, 3, 3]
    arm = values["comparisons"][0]["arms"][1]
    assert arm["folders"] == [str(tmp_path / f"0-bf16-{seed}") for seed in range(3)]
    assert arm["figures"]["step_ms"]["n"] == 3
    assert arm["against_reference"]["loss_difference"]["mean"] == pytest.approx(0.011)
    assert values["skipped"] == [
        {"folder": str(tmp_path / "running"), "reason": "no result yet: still running, or killed"}
    ]
    assert "model" in values["comparisons"][1]["differs_from_the_one_above"]


# --- the script --------------------------------------------------------------------------------------------------


def script(*words, cwd=None):
    return run("compare.py", *words, cwd=cwd)


def test_the_script_prints_and_writes_beside_the_runs(tmp_path):
    done = script(fleet(tmp_path), "--sort", "step_ms", "--reference", "bf16", "--where", "arm=fp32,bf16")
    assert (done.returncode, done.stderr) == (0, "")
    assert cells(done.stdout, "arm   runs")[0][0] == "bf16"
    assert done.stdout.startswith("only runs with arm=fp32,bf16\n")
    assert "only runs with arm=fp32,bf16" in (tmp_path / "comparison.md").read_text()
    assert sorted(path.name for path in tmp_path.glob("comparison.*")) == [
        "comparison.csv", "comparison.json", "comparison.md"
    ]  # fmt: skip
    assert done.stdout.endswith(f"written: {tmp_path}/comparison.md, .csv, .json\n")


def test_the_files_go_where_one_likes(tmp_path):
    runs, into = fleet(tmp_path / "runs"), tmp_path / "new" / "page"
    assert script(runs, "--into", into).returncode == 0
    assert not list(runs.glob("comparison.*"))
    assert len(list(into.iterdir())) == 3


def test_a_closed_terminal_is_no_reason_to_write_nothing(tmp_path):
    put(tmp_path / "0")
    command = f"{sys.executable} {ROOT}/scripts/compare.py {tmp_path} >&-"
    done = subprocess.run(command, shell=True, env=os.environ | {"PYTHONPATH": f"{ROOT}/src"}, timeout=60)
    assert done.returncode == 0
    assert len(list(tmp_path.glob("comparison.*"))) == 3


def test_the_folder_one_stands_in_will_do(tmp_path):
    put(tmp_path / "0")
    done = script(".", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(list(tmp_path.glob("comparison.*"))) == 3


def test_the_files_of_several_folders_go_into_what_these_share(tmp_path):
    for name in ("a", "b"):
        put(tmp_path / "sweeps" / name / "0")
    assert script(tmp_path / "sweeps" / "a", tmp_path / "sweeps" / "b").returncode == 0
    assert len(list((tmp_path / "sweeps").glob("comparison.*"))) == 3
    assert not list((tmp_path / "sweeps" / "a").glob("comparison.*"))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["/nowhere"], "/nowhere is not a folder; name one that holds runs."),
        (["{empty}"], "There is no result in {empty}; train something first."),
        (["{runs}", "--reference", "fp8"], "--reference fp8 is no arm of these runs; they have bf16, fp16, fp32."),
        (["{runs}", "--where", "seed=9"], "--where seed=9 fits no run; there is seed=0, 1, 2."),
        (["{runs}", "--where", "seed=2", "--where", "arm=fp16"], "No run fits all of seed=2 and arm=fp16."),
        (["{runs}", "--sort", "speed"], "--sort speed is no column; valid are step_ms,"),
        (["{runs}", "--into", "{file}/x"], "{file}/x cannot be written to (Not a directory); name a folder"),
        (["{runs}", "/"], "{runs}, /: nothing is written to /; name a folder with --into."),
    ],
)  # fmt: skip
def test_the_script_refuses_in_one_sentence(tmp_path, words, sentence):
    places = {"empty": tmp_path / "empty", "runs": fleet(tmp_path / "runs"), "file": tmp_path / "file"}
    places["file"].touch()
    places["empty"].mkdir()
    done = script(*(word.format(**places) for word in words))
    assert done.returncode == 2
    assert done.stderr.startswith(f"precision-lab: {sentence.format(**places)}")
    assert "Traceback" not in done.stderr


def test_every_arm_of_conf_has_a_made_up_fellow():
    assert {path.stem for path in (ROOT / "conf" / "precision").glob("*.yaml")} >= set(ARMS)

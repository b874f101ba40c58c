"""Why an arm's peak is what it is: the sentence for each case, from made-up kinds."""

import csv
import io
import json

import pytest

from made_up import put, result
from precision_lab.report import files
from precision_lab.report.compare import compare
from precision_lab.report.memory import memory_reasons
from precision_lab.report.read import read
from precision_lab.report.reading import reading

MIB = 2**20
WEIGHTS = {"parameters": 8, "gradients": 8, "optimizer_state": 16}


def run(arm: str, phase: str = "backward", **kinds: float):
    """A made-up result whose peak is made of these MiB."""
    by_kind = {kind: int(size * MIB) for kind, size in kinds.items()}
    memory = {"phase": phase, "by_kind": by_kind, "peak_bytes": sum(by_kind.values())}
    return result(arm, memory=memory, peak_allocated_gib=sum(by_kind.values()) / 2**30)


def comparison(folder, *made, **words):
    for number, one in enumerate(made):
        put(folder / str(number), one)
    (only,) = compare(read([folder]), **words)
    return only


@pytest.mark.parametrize(
    ("full", "low", "sentence"),
    [
        (
            run("fp32", **WEIGHTS, saved_activations=1),
            run("bf16", **WEIGHTS, saved_activations=0.5, temporaries=2),
            "bf16 saves no memory here (34.5 against 33 MiB), because parameters, gradients and optimizer state, which "
            "autocast leaves as they are, take 32 of fp32's 33 MiB at the peak, which sits in the backward pass; "
            "temporaries take 2 MiB more.",
        ),
        (
            run("fp32", "optimizer", **WEIGHTS, temporaries=8),
            run("bf16", "optimizer", **WEIGHTS, temporaries=8),
            "bf16 saves no memory here (40 against 40 MiB), because the peak sits in the optimizer step, where "
            "autocast changes nothing: parameters, gradients and optimizer state take 32 of fp32's 40 MiB.",
        ),
        (
            run("fp32", parameters=8, saved_activations=24),
            run("bf16", parameters=8, saved_activations=12, weight_casts=12),
            "bf16 saves no memory here (32 against 32 MiB), because what some kinds save is taken by others: saved "
            "activations take 12 MiB less, weight casts 12 more.",
        ),
        (
            run("fp32", **WEIGHTS, saved_activations=8),
            run("bf16", **WEIGHTS, saved_activations=6),
            "bf16 saves little memory here (38 against 40 MiB), because parameters, gradients and optimizer state, "
            "which autocast leaves as they are, take 32 of fp32's 40 MiB at the peak, which sits in the backward pass.",
        ),
        (
            run("fp32", **WEIGHTS, saved_activations=96, kernel_scratch=1),
            run("bf16", **WEIGHTS, saved_activations=48, weight_casts=4, kernel_scratch=0),
            "bf16 saves 45 of fp32's 129 MiB at the peak: saved activations take 48 MiB less, weight casts 4 more.",
        ),
        (
            run("fp32", **WEIGHTS, saved_activations=96),
            run("bf16_pure", parameters=4, gradients=4, optimizer_state=8, saved_activations=48),
            "bf16_pure saves 64 of fp32's 128 MiB at the peak, since parameters, gradients and optimizer state are in "
            "bfloat16 as well: saved activations take 48 MiB less, optimizer state 8 less, parameters 4 less, "
            "gradients 4 less.",
        ),
        (
            run("fp32", parameters=8, batch=24),
            run("bf16", parameters=8, batch=24),
            "bf16 saves no memory here (32 against 32 MiB).",
        ),
    ],
    ids=["weights", "optimizer", "casts", "little", "activations", "all halve", "no reason known"],
)
def test_the_sentence_of_each_case(tmp_path, full, low, sentence):
    made = comparison(tmp_path, full, low)
    assert memory_reasons(made) == [sentence]
    assert sentence in reading(made)
    assert "since weights, gradients" not in " ".join(reading(made))  # what is said where no kinds are known


@pytest.mark.parametrize(
    "low",
    [
        run("bf16", **WEIGHTS) | {"memory": None},
        run("bf16", **WEIGHTS) | {"memory": {"phase": "backward", "by_kind": {}}},
        run("tf32", **WEIGHTS),  # stores everything in float32
        run("bf16", parameters=1) | {"summary": run("fp32", **WEIGHTS)["summary"]},  # the figures tell another ratio
        run("bf16", **WEIGHTS) | {"status": "diverged"},
    ],
    ids=["no part", "no kinds", "tf32", "other figures", "diverged"],
)
def test_no_reason_where_the_figures_do_not_carry_one(tmp_path, low):
    assert memory_reasons(comparison(tmp_path, run("fp32", **WEIGHTS), low)) == []


def test_no_reason_beside_a_reference_that_tells_nothing_or_is_low_itself(tmp_path):
    pair = run("fp32", **WEIGHTS), run("bf16", **WEIGHTS)
    assert memory_reasons(comparison(tmp_path / "a", pair[0] | {"memory": None}, pair[1])) == []
    assert memory_reasons(comparison(tmp_path / "b", *pair, reference="bf16")) == []


def test_the_newest_counted_run_tells_and_the_files_have_it(tmp_path):
    older = run("fp32", parameters=1)
    newer = run("fp32", "optimizer", **WEIGHTS) | {"seed": 1, "finished": older["finished"] + 1}
    silent = run("fp32", parameters=1) | {"seed": 2, "finished": older["finished"] + 2, "memory": None}
    made = comparison(tmp_path, older, newer, silent)
    (line,) = csv.DictReader(io.StringIO(files.as_csv([made])))
    assert (line["peak_phase"], line["peak_parameters_mib"], line["peak_optimizer_state_mib"]) == (
        "optimizer", "8.0", "16.0",
    )  # fmt: skip
    (arm,) = json.loads(files.as_json([made], read([tmp_path])))["comparisons"][0]["arms"]
    assert arm["memory"] == newer["memory"]

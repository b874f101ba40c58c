"""The lines that sum up a run."""

from precision_lab.terminal import summary_lines

FINAL = {
    "val/loss": 0.08123,
    "val/loss_fp32": 0.08127,
    "val/accuracy": 0.9833,
    "perf/step_ms_p50": 5.934,
    "perf/step_ms_p95": 7.001,
    "perf/measured_steps": 390,
    "mem/saved_activations_mib": 1.787,
    "mem/peak_allocated_gib": 0.00404,
    "amp/skipped_steps": 2,
}


def test_every_figure_stands_in_lines_of_a_narrow_terminal():
    lines = summary_lines("fp16", "completed", None, 400, FINAL).split("\n")
    assert lines == [
        "fp16: completed at step 400",
        "  val loss 0.0812 (in fp32 0.0813), accuracy 0.983, 2 updates skipped",
        "  5.93 ms a step (median of 390; 95 % below 7)",
        "  saved activations 1.79 MiB, peak allocated 0.00404 GiB",
    ]


def test_what_was_not_measured_is_left_out():
    final = {"perf/step_ms_p50": None, "mem/peak_allocated_gib": None, "amp/skipped_steps": 0}
    assert summary_lines("bf16", "diverged", "loss is nan", 12, final) == "bf16: diverged at step 12 (loss is nan)"

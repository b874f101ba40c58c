"""Every warning of the list: when it is given, and that a faultless comparison carries none but the first."""

import pytest

from made_up import H100, V100, benchmark, put, put_benchmark, result
from precision_lab.report.compare import compare
from precision_lab.report.read import read
from precision_lab.report.warnings import OF_A_BENCHMARK, WARNINGS, ranges, warnings_of

RULES = WARNINGS + OF_A_BENCHMARK
SEEDS = range(6)
FASTER = (1.5, 1.48, 1.52)
HELD_DOWN = {
    "start": {"busy_cores": 4.5, "cores": 8, "throttled_by": [], "other_processes": [77]},
    "end": {"busy_cores": 0.1, "cores": 8, "throttled_by": ["SwPowerCap"], "other_processes": [77]},
}


def sound():
    """Six pairs on a machine that has the units, nothing wrong with them."""
    return [result(arm, seed, H100) for arm in ("fp32", "bf16") for seed in SEEDS]


def told(folder, made, **words):
    for number, one in enumerate(made):
        put_benchmark(folder / str(number), one) if "columns" in one else put(folder / str(number), one)
    (one,) = compare(read([folder]), **words)
    return dict(warnings_of(one))


def changed(made, chosen, **changes):
    """The same results; those for which `chosen(arm, seed)` holds are made with the changes."""
    return [
        result(one["arm"], one["seed"], one["fingerprint"], **changes) if chosen(one["arm"], one["seed"]) else one
        for one in made
    ]


def bf16(arm, seed):
    return arm == "bf16"


def last(arm, seed):
    return arm == "bf16" and seed == 5


def skipping(made):
    made["arms"]["bf16"]["skipped_steps"] = 3
    return made


CASES = {
    "no_reference": (
        lambda: [one for one in sound() if one["arm"] == "bf16"] + [result("fp32", 0, H100, status="failed")],
        "The reference arm fp32 has no completed run here, so there are no ratios and differences: run it, or name "
        "another with --reference: bf16.",
    ),
    "one_seed": (lambda: sound() + [result("fp16", 0, H100)], "One completed run only, so no spread: fp16."),
    "few_pairs": (lambda: [one for one in sound() if one["seed"] < 3], "decide nothing on the loss: bf16 3."),
    "not_completed": (
        lambda: changed(sound(), last, status="diverged") + [result("bf16", 7, H100, status="failed")],
        "Not every run completed: bf16 1 diverged and 1 failed of 7.",
    ),
    "unequal_seeds": (
        lambda: sound() + [result("bf16", 9, H100)],
        "The arms' seeds differ: fp32 has 0-5, bf16 has 0-5 9.",
    ),
    "unequal_start": (
        lambda: changed(sound(), last, hashes={"batches": "others"}),
        "than the reference arm's: bf16 seed 5.",
    ),
    "unreadable_files": (
        lambda: changed(sound(), last, unreadable_files={"count": 12, "first": ["a.png"]}),
        "were left out or replaced by others: bf16 up to 12 a run.",
    ),
    "skipped_steps": (
        lambda: changed(sound(), last, skipped_steps=3),
        "Steps were skipped because the gradient was not finite: bf16 0.5 a run.",
    ),
    "emulated_target": (
        lambda: sound() + [result("fp16[emulate=cuda]", seed, H100) for seed in SEEDS],
        "The arithmetic of another device was emulated: fp16[emulate=cuda] (cuda).",
    ),
    "evaluation_rounds": (
        lambda: changed(sound(), bf16, val_loss=0.506),
        "between the arm's precision and float32: bf16 0.506, in float32 0.5.",
    ),
    "emulated": (
        lambda: [result(one["arm"], one["seed"], V100) for one in sound()],
        "and emulates it: bf16 (bfloat16).",
    ),
    "few_steps": (
        lambda: changed(sound(), last, measured_steps=19),
        "The step time is the median of few measured steps: bf16 19.",
    ),
    "waiting_for_data": (
        lambda: changed(sound(), bf16, data_wait_share=0.4),
        "Steps waited for data, which no precision makes faster: bf16 40% of the time.",
    ),
    "unsteady": (
        lambda: changed(sound(), last, step_ms_p50=2.3),
        "Step times differ by more than 10 % from run to run: bf16 2 to 2.3 ms.",
    ),
    "mixed_versions": (
        lambda: changed(sound(), last, versions={"torch": "2.11.0"}),
        "different versions: torch 2.14.1 (11 runs), torch 2.11.0 (1 run).",
    ),
    "mixed_code": (
        lambda: changed(sound(), last, git={"dirty": True}),
        "different code: abcdef01 (11 runs), abcdef01 with uncommitted changes (1 run).",
    ),
    "several_machines": (lambda: changed(sound(), last, host="there"), "here (11 runs), there (1 run)."),
    "superseded": (
        lambda: sound() + [result("fp32", 0, H100, finished=1.0)],
        "Completed runs that do not count, since a newer one has their arm and seed: ",
    ),
    "timed_in_turn": (lambda: sound(), "Arms were timed one after the other and not in alternation"),
    "benchmark_floor": (
        lambda: [*sound(), benchmark(H100, floor=(1.02, 1.01, 1.03), bf16=FASTER)],
        "the reference arm timed against itself left 1 out (computing alone 1.020 [1.010, 1.030]).",
    ),
    "benchmark_disturbed": (
        lambda: [*sound(), benchmark(H100, bf16=FASTER) | {"conditions": HELD_DOWN}],
        "While arms were timed: Others kept 4.5 of 8 cores busy. The GPU's clocks were held down: "
        "SwPowerCap. Other processes were on the GPU: 77.",
    ),
    "benchmark_skipped": (
        lambda: [*sound(), skipping(benchmark(H100, bf16=FASTER))],
        "Steps were skipped in timed blocks, and a skipped step may be cheaper: bf16 3.",
    ),
    "benchmark_not_used": (
        lambda: [
            *sound(),
            benchmark(H100, bf16=FASTER),
            benchmark(H100, floor=(1.02, 1.01, 1.03), bf16=FASTER) | {"finished": 3_000_000.0},
        ],
        "A newer benchmark is not used: in it the reference arm timed against itself left 1 out (computing alone 1.020",
    ),
    "benchmark_few_sittings": (
        lambda: [*sound(), benchmark(H100, bf16=FASTER) | {"sittings": 7}],
        "Only 7 sittings fitted into the time of the benchmark: its intervals are rough.",
    ),
    "benchmark_unsettled": (
        lambda: [*sound(), benchmark(H100, bf16=FASTER) | {"warm_up_capped": 6}],
        "In 6 of 10 sittings the step time had not settled when the warm-up ended.",
    ),
    "benchmark_versions": (
        lambda: [*sound(), benchmark(H100, bf16=FASTER) | {"versions": {"python": "3.12.1", "torch": "2.11.0"}}],
        "made with other versions: torch 2.11.0, the newest run 2.14.1.",
    ),
}


def test_the_list_has_a_test_for_each_and_one_text_each():
    codes = [warning.code for warning in RULES]
    assert sorted(codes) == sorted(CASES)
    assert len({warning.text for warning in RULES}) == len(codes) == len(set(codes))


@pytest.mark.parametrize("code", CASES)
def test_a_warning_is_given_when_it_applies_and_says_of_whom(tmp_path, code):
    make, words = CASES[code]
    given = told(tmp_path, make())
    assert words in given[code]
    along = {
        "no_reference": {"not_completed"},
        "one_seed": {"unequal_seeds"},
        "not_completed": {"unequal_seeds", "few_pairs"},
    }
    assert set(given) - {"timed_in_turn", code} <= along.get(code, set())


def test_a_benchmark_lifts_the_warning_of_the_arms_that_it_timed(tmp_path):
    timed = benchmark(H100, bf16=FASTER)
    assert told(tmp_path / "all", [*sound(), timed]) == {}
    more = [*sound(), *(result("tf32", seed, H100) for seed in SEEDS), timed]
    assert told(tmp_path / "some", more)["timed_in_turn"].startswith("tf32: these arms were timed one after the other")


@pytest.mark.parametrize(
    "other", [{"experiment_signature": "76543210"}, {"data_hash": "other"}, {"fingerprint": dict(V100)}]
)
def test_a_benchmark_of_something_else_lifts_nothing(tmp_path, other):
    assert set(told(tmp_path, [*sound(), benchmark(H100, bf16=FASTER) | other])) == {"timed_in_turn"}


def test_evaluation_is_compared_within_a_run(tmp_path):
    lone = changed(sound(), last, val_loss=1.0, val_loss_fp32=None)
    assert "evaluation_rounds" not in told(tmp_path, lone)


@pytest.mark.parametrize(("seeds", "pairs"), [((1, 2), 1), ((2, 3), 0)])
def test_seeds_that_are_hardly_shared_are_warned_of(tmp_path, seeds, pairs):
    made = [result("fp32", seed, H100) for seed in (0, 1)] + [result("bf16", seed, H100) for seed in seeds]
    assert f"decide nothing on the loss: bf16 {pairs}." in told(tmp_path, made)["few_pairs"]


def test_six_sound_pairs_carry_the_one_warning_of_runs_timed_in_turn(tmp_path):
    assert set(told(tmp_path, sound())) == {"timed_in_turn"}


def test_thresholds_are_not_passed_by_what_lies_on_them(tmp_path):
    made = changed(sound(), last, step_ms_p50=2.19, measured_steps=20, val_loss=0.5024)
    assert set(told(tmp_path, changed(made, lambda arm, seed: arm == "fp32", data_wait_share=0.1))) == {"timed_in_turn"}


def test_a_lone_arm_is_warned_of_nothing_but_its_lone_run(tmp_path):
    assert set(told(tmp_path, [result()])) == {"one_seed"}


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([3], "3"), ([0, 1, 2], "0-2"), ([0, 2, 3, 9], "0 2-3 9"), ([7, 8], "7-8")]
)
def test_ranges(numbers, text):
    assert ranges(numbers) == text

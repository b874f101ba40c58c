"""The plan of a sweep: what each job is called, when its turn is, and which jobs will not run for what reason."""

import json
import shutil
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from precision_lab import config
from precision_lab.config import Rerun, load_precision
from precision_lab.errors import InputError
from precision_lab.folders import job_folder
from precision_lab.sweep.plan import Answer, Job, in_turn, settle, titles

HERE = {"device": "cpu", "model": "X"}
BF16 = Answer(precision=load_precision("bf16"), device="cpu", fingerprint=HERE)
FP32 = replace(BF16, precision=load_precision("fp32"))
REFUSED = Answer(refused="precision=fp16 needs float16, which this machine does not have.")


@cache
def composed(*overrides):
    return config.compose(list(overrides))


@cache
def arm(name):
    return load_precision(name)


def job(words, outputs="/nowhere", **more):
    """A job as Hydra would compose it, but for arm, seed and folder, which are put in afterwards: faster."""
    values = dict(word.split("=", 1) for word in words.split())
    precision, seed = arm(values.pop("precision", "auto")), int(values.pop("seed", 0))
    asked = composed(*(f"{key}={value}" for key, value in values.items()))
    paths = replace(asked.paths, outputs=str(outputs))
    return Job(words.split(), words, replace(asked, precision=precision, seed=seed, paths=paths, **more))


def grid(*axes):
    """Jobs as the sweeper hands them over: the last axis varies first."""
    return [job(" ".join(words)) for words in product(*axes)]


def order(jobs):
    return [one.title for one in in_turn(jobs)]


def write(folder, status, **more):
    folder.mkdir(parents=True)
    (folder / "status.json").write_text(json.dumps({"status": status, **more}))
    (folder / "result.json").write_text(json.dumps({"fingerprint": HERE}))


# --- what is there -----------------------------------------------------------------------------


def test_the_folders_of_the_jobs_alone_say_what_is_to_run(tmp_path):
    def jobs():
        made = [job(f"experiment=smoke precision=fp32 seed={seed}", tmp_path) for seed in range(3)]
        settle(made, [FP32] * 3)
        return made

    first = jobs()
    assert [one.status for one in first] == ["waiting"] * 3
    for one in first:
        write(one.folder, "completed")
    commands = first[0].folder.parent / "commands"
    (commands / "2026-01-01").mkdir(parents=True)
    assert [one.status for one in jobs()] == ["completed"] * 3
    shutil.rmtree(commands)
    assert [one.status for one in jobs()] == ["completed"] * 3
    shutil.rmtree(first[0].folder)
    (first[1].folder / "result.json").unlink()
    assert [one.status for one in jobs()] == ["waiting", "waiting", "completed"]


# --- titles ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([["a=1", "x=0"], ["a=2", "x=0"]], ["a=1", "a=2"]),
        ([["x=0", "a=1", "b=1"], ["x=0", "a=1", "b=2"], ["x=0", "a=2", "b=1"]], ["a=1 b=1", "a=1 b=2", "a=2 b=1"]),
        ([["a=1", "b=1"]], ["a=1 b=1"]),  # a job alone differs from nobody
        ([["a=1", "b=1"]] * 2, ["a=1 b=1"] * 2),
        ([["a=1"], ["a=1", "b=1"]], ["a=1", "b=1"]),
        ([[]], ["defaults"]),
        ([[], ["a=1"]], ["defaults", "a=1"]),
        ([["m=[16,32]", "x"], ["m=[16]", "x"]], ["m=[16,32]", "m=[16]"]),
    ],
)
def test_a_title_is_what_a_job_does_not_share(overrides, expected):
    assert titles(overrides) == expected


# --- in turn ---------------------------------------------------------------------------------

ARMS = ("precision=fp32", "precision=bf16", "precision=fp16")


@pytest.mark.parametrize("seeds_first", [True, False])
def test_each_arm_has_each_place_once(seeds_first):
    axes = [ARMS, ("seed=0", "seed=1", "seed=2")]
    turns = order(grid(*(axes[::-1] if seeds_first else axes)))
    rounds = [turns[start : start + 3] for start in (0, 3, 6)]
    for seed, one in enumerate(rounds):
        assert all(f"seed={seed}" in title for title in one)
    for place in range(3):
        assert {next(word for word in one[place].split() if word in ARMS) for one in rounds} == set(ARMS)


def test_the_jobs_keep_their_order_where_there_is_nothing_to_rotate():
    assert order(grid(ARMS)) == list(ARMS)
    assert order(grid(("seed=2", "seed=0", "seed=1"))) == ["seed=2", "seed=0", "seed=1"]
    assert order([]) == []


def test_no_job_is_lost_or_doubled_where_seeds_have_unlike_arms():
    jobs = grid(("seed=0", "seed=1"), ARMS)
    del jobs[4]
    assert sorted(order(jobs)) == sorted(one.title for one in jobs)


@pytest.mark.parametrize("axis", ["trainer.steps={}", "device={}"])
def test_experiments_and_devices_do_not_mix(axis):
    values = {"trainer.steps={}": ("3", "4"), "device={}": ("cpu", "auto")}[axis]
    words = [axis.format(value) for value in values]
    turns = order(grid(ARMS[:2], words))
    assert [title.split()[1] for title in turns] == [words[0]] * 2 + [words[1]] * 2


@pytest.mark.parametrize("axes", [(2, 2, 4), (2, 3, 3), (3, 3, 3), (4, 2, 2)])
@pytest.mark.parametrize("outer", ["seeds", "experiments"])
def test_in_each_of_several_experiments_no_arm_is_always_first(axes, outer):
    experiments, arms, seeds = axes
    steps, seeds = [f"trainer.steps={n + 1}" for n in range(experiments)], [f"seed={n}" for n in range(seeds)]
    outer_axes = [seeds, steps] if outer == "seeds" else [steps, seeds]
    turns = order(grid(*outer_axes, ARMS[:arms]))
    firsts = Counter()
    for start in range(0, len(turns), arms):
        words = set(turns[start].split())
        firsts[next(w for w in steps if w in words), next(w for w in ARMS if w in words)] += 1
    assert firsts == {pair: len(seeds) // arms for pair in product(steps, ARMS[:arms])}


def test_those_that_never_run_stand_at_the_end_and_take_no_turn():
    jobs = grid(("seed=0", "seed=1"), ARMS)
    for one in jobs:
        if "fp16" in one.title:
            one.status = "unsupported"
    jobs[0].status = "same"
    assert order(jobs) == [
        *("seed=0 precision=bf16", "seed=1 precision=bf16", "seed=1 precision=fp32"),
        *("seed=0 precision=fp32", "seed=0 precision=fp16", "seed=1 precision=fp16"),
    ]


def test_those_that_were_run_before_keep_their_turn():
    """A sweep that is taken up again runs in the order it had."""
    jobs = grid(("seed=0", "seed=1"), ARMS)
    fresh = order(jobs)
    for one in jobs[1::2]:
        one.status, one.before = "completed", True
    assert order(jobs) == fresh


# --- settled ---------------------------------------------------------------------------------


def test_auto_becomes_the_arm_that_the_machine_chose(tmp_path):
    one = job("precision=auto seed=3", tmp_path)
    assert settle([one], [BF16]) == []
    assert one.asked.precision == load_precision("bf16")
    assert (one.status, one.fingerprint) == ("waiting", HERE)
    assert one.folder == job_folder(job("precision=bf16 seed=3", tmp_path).asked, "cpu")
    assert not list(tmp_path.iterdir())


def test_the_device_that_was_chosen_is_in_the_folder_s_name():
    one, two = job("precision=bf16"), job("precision=bf16")
    settle([one], [BF16])
    settle([two], [replace(BF16, device="cuda")])
    assert one.folder != two.folder


def test_what_the_machine_notes_is_told_once():
    jobs = grid(("seed=0", "seed=1"), ("precision=bf16",))
    answers = [replace(BF16, notes=("slow", "no cuda")), replace(BF16, notes=("no cuda", "other"))]
    assert settle(jobs, answers) == ["slow", "no cuda", "other"]


def test_an_arm_that_the_machine_cannot_do_stops_the_sweep_with_each_reason_once():
    jobs = grid(("precision=fp16", "precision=bf16"), ("seed=0", "seed=1"))
    other = Answer(refused="precision=bf16 needs bfloat16.")
    with pytest.raises(InputError) as caught:
        settle(jobs, [REFUSED, REFUSED, other, BF16])
    assert str(caught.value) == f"{REFUSED.refused} {other.refused} on_unsupported=skip runs the others."


def test_an_arm_that_the_machine_cannot_do_is_skipped_where_that_is_asked_for():
    jobs = [job(f"precision={name} on_unsupported=skip") for name in ("fp16", "bf16")]
    settle(jobs, [REFUSED, BF16])
    assert [(one.status, one.reason) for one in jobs] == [("unsupported", REFUSED.refused), ("waiting", "")]


def test_all_arms_may_be_skipped():
    jobs = [job(f"precision=fp16 seed={seed} on_unsupported=skip") for seed in (0, 1)]
    settle(jobs, [REFUSED, REFUSED])
    assert [one.status for one in jobs] == ["unsupported"] * 2
    assert in_turn(jobs) == jobs


@pytest.mark.parametrize("names", [("auto", "bf16"), ("bf16", "auto")])
def test_auto_beside_what_it_chose_is_the_same_run(names):
    jobs = [job(f"precision={name}") for name in names]
    settle(jobs, [BF16, BF16])
    assert [(one.status, one.reason) for one in jobs] == [
        *(("waiting", ""), ("same", f"the same run as precision={names[0]}"))
    ]


def test_of_three_that_are_the_same_one_runs():
    jobs = [job("precision=bf16 seed=0") for _ in range(3)] + [job("precision=bf16 seed=1")]
    settle(jobs, [BF16] * 4)
    assert [one.status for one in jobs] == ["waiting", "same", "same", "waiting"]


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("trainer.workers=0", "trainer.workers=1"),
        ("tags=[a]", "tags=[b]"),
        ("on_error=stop", "on_error=continue"),
        ("rerun=all", "rerun=never"),
        ("wandb.mode=offline", "wandb.mode=disabled"),
        ("device=cpu", "device=auto"),
    ],
)
def test_two_jobs_that_differ_in_nothing_that_counts_are_refused(tmp_path, one, two):
    jobs = [job(f"precision=bf16 {words}", tmp_path) for words in (one, two)]
    with pytest.raises(InputError) as caught:
        settle(jobs, [BF16, BF16])
    assert str(caught.value).startswith(f"precision=bf16 {one} and precision=bf16 {two} are one and the same run: ")
    assert "name=" in str(caught.value)


def test_a_difference_in_name_alone_makes_two_runs(tmp_path):
    jobs = [job(f"precision=bf16 name={name}", tmp_path) for name in ("a", "b")]
    settle(jobs, [BF16, BF16])
    assert [one.status for one in jobs] == ["waiting", "waiting"]
    assert jobs[0].folder != jobs[1].folder


@pytest.mark.parametrize("status", ["completed", "diverged", "out_of_memory", "failed", "running", "interrupted"])
@pytest.mark.parametrize("rerun", Rerun)
def test_what_was_run_before_is_left_with_its_reason(tmp_path, status, rerun):
    one, other = (job(f"precision=bf16 seed={seed}", tmp_path, rerun=rerun) for seed in (0, 1))
    write(job_folder(one.asked, "cpu"), status, reason="so it was")
    settle([one, other], [BF16, BF16])
    results = ("completed", "diverged", "out_of_memory")
    left = status in {"never": (*results, "failed"), "failed": results, "all": ()}[rerun.name]
    assert (one.status, one.reason, one.before) == ((status, "so it was", True) if left else ("waiting", "", False))
    assert (other.status, other.before) == ("waiting", False)


def test_a_job_run_before_without_a_reason_has_none(tmp_path):
    one = job("precision=bf16", tmp_path)
    write(job_folder(one.asked, "cpu"), "completed", reason=None)
    settle([one], [BF16])
    assert (one.status, one.reason) == ("completed", "")


def test_the_same_run_beside_one_that_was_run_before_is_still_the_same(tmp_path):
    jobs = [job(f"precision={name}", tmp_path) for name in ("bf16", "auto")]
    write(job_folder(jobs[0].asked, "cpu"), "completed")
    settle(jobs, [BF16, BF16])
    assert [(one.status, one.before) for one in jobs] == [("completed", True), ("same", False)]


def test_another_machine_s_run_is_refused(tmp_path):
    one = job("precision=bf16", tmp_path)
    write(job_folder(one.asked, "cpu"), "completed")
    with pytest.raises(InputError, match=r"other hardware \(model X, here Y\)"):
        settle([one], [replace(BF16, fingerprint={**HERE, "model": "Y"})])


def test_a_check_looks_at_no_finished_run(tmp_path):
    one = job("precision=bf16 check=true", tmp_path)
    write(job_folder(one.asked, "cpu"), "completed")
    settle([one], [replace(BF16, fingerprint={"model": "another machine's"})])
    assert (one.status, one.before) == ("waiting", False)


def test_a_check_refuses_an_arm_all_the_same():
    with pytest.raises(InputError, match="does not have"):
        settle([job("precision=fp16 check=true")], [REFUSED])

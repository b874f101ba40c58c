"""The verdict in words: for each case the right headline, the reasons with their figures, and a command that works."""

import json
import shlex

import pytest

from made_up import H100, V100, XEON, put, result
from precision_lab.arms import arm_text, arms_of
from precision_lab.config import ROOT, compose
from precision_lab.ratios import Ratio
from precision_lab.report import files
from precision_lab.report.compare import Timing, compare
from precision_lab.report.read import read
from precision_lab.report.verdict import verdict_of

SIX = range(6)
FASTER = Ratio(40, 1.52, 1.48, 1.56)
SLOWER = Ratio(40, 0.75, 0.73, 0.77)
SAME = Ratio(40, 1.0, 0.99, 1.01)
OPEN = Ratio(40, 1.02, 0.95, 1.09)
BASE = ["experiment=demo", "name=night", "device.threads=1", "model.hidden=[32,32]"]
NONE = "No verdict yet on this hardware."


def runs(arm, seeds=SIX, machine=H100, words=(), **changes):
    """Runs of one arm whose loss moves with the seed, and differs from fp32's by `worse` of it."""
    off = changes.pop("off", 0.0)
    name = arm.partition("[")[0]
    return [
        result(
            arm, seed, machine,
            overrides=[*BASE, f"precision={name}", *words, f"seed={seed}"],
            **{"val_loss_fp32": 0.5 + 0.01 * seed + off + 1e-5 * (-1) ** seed * (name != "fp32")} | changes,
        )
        for seed in seeds
    ]  # fmt: skip


def compared(folder, *arms, reference="fp32", **timed):
    """The comparison of some arms' runs, with ratios put on by hand."""
    for number, made in enumerate(one for arm in arms for one in arm):
        put(folder / str(number), made)
    comparison = compare(read([folder]), reference)[0]
    for row in comparison.rows:
        row.timing = Timing(timed[row.arm]) if row.arm in timed else None
    return comparison


def verdict(folder, *arms, **timed):
    found = verdict_of(compared(folder, *arms, **timed))
    composes(found.command)
    assert not any(
        sentence.count("  ") or sentence.count("..") or not sentence.endswith(".") for sentence in found.sentences
    )
    return found


def composes(command):
    """Every job of the command is one that train.py, or benchmark.py, would take."""
    for line in command.split(" && "):
        python, script, *words = shlex.split(line)
        assert python == "python"
        given = dict(word.split("=", 1) for word in words if "=" in word)
        assert [given[key] for key in ("experiment", "name", "device.threads", "model.hidden")] == [
            "demo", "night", "1", "[32,32]"
        ]  # fmt: skip
        if script == "scripts/benchmark.py":
            own = [word for word in words if word.startswith(("arms=", "budget_s=", "reference="))]
            assert len(arms_of(given["arms"], [word for word in words if word not in own])) > 1
            continue
        assert script == "train.py"
        assert words.count("-m") == ("seed" in given)
        plain = [word for word in words if word != "-m" and not word.startswith(("precision=", "seed="))]
        for arm in given["precision"].split(","):
            assert compose([*plain, f"precision={arm}"]).precision.name == arm


def line(*words):
    return shlex.join(["python", "train.py", *words[: words[0] == "-m"], *BASE, *words[words[0] == "-m" :]])


def test_faster_and_equivalent(tmp_path):
    made = verdict(tmp_path, runs("fp32"), runs("bf16", peak_allocated_gib=2.48), bf16=FASTER)
    assert made.headline == "Use bf16 here."
    assert made.sentences == [
        "On this Made-up H100 bf16 is faster here (1.52 [1.48, 1.56] times the speed of fp32) and takes 38 % less peak "
        "memory.",
        "After 200 steps of batch 64 its validation loss is equivalent; what a much longer run does is not shown.",
    ]
    assert made.command == line("precision=bf16")


def test_the_fastest_of_the_good_ones_wins_and_the_others_are_told(tmp_path):
    arms = [runs(arm) for arm in ("fp32", "tf32", "bf16", "fp16")]
    faster = Ratio(40, 1.9, 1.8, 2.0)
    made = verdict(tmp_path, *arms, bf16=FASTER, fp16=faster, tf32=SLOWER)
    assert made.headline == "Use fp16 here."
    assert made.sentences[-1] == (
        "Of the others, tf32 is slower here (0.75 [0.73, 0.77] times the speed of fp32) and saves no peak memory; "
        "bf16 is faster here (1.52 [1.48, 1.56] times the speed of fp32) and saves no peak memory."
    )


@pytest.mark.parametrize(("peak", "headline"), [(3.5, "Use bf16 here."), (3.7, "Stay with fp32 here.")])
def test_as_fast_is_worth_a_change_only_where_a_tenth_of_the_memory_is_saved(tmp_path, peak, headline):
    made = verdict(tmp_path, runs("fp32"), runs("bf16", peak_allocated_gib=peak), bf16=SAME)
    assert made.headline == headline
    assert "makes no practical difference to speed (1.00 [0.99, 1.01])" in made.sentences[0]


def test_a_better_loss_will_do_as_well(tmp_path):
    made = verdict(tmp_path, runs("fp32"), runs("bf16", off=-0.1), bf16=FASTER)
    assert made.headline == "Use bf16 here."
    assert "its validation loss is better by 0.10" in made.sentences[1]


def test_faster_and_worse(tmp_path):
    made = verdict(tmp_path, runs("fp32"), runs("bf16_pure", off=0.1), bf16_pure=FASTER)
    assert made.headline == "Stay with fp32 here."
    assert made.sentences == [
        "On this Made-up H100 bf16_pure is faster here (1.52 [1.48, 1.56] times the speed of fp32) and saves no peak "
        "memory, but its validation loss is worse by 0.10.",
        "Where the range or rounding of bf16_pure hurts can be found: see docs/mixed-precision.md.",
    ]
    assert (ROOT / "docs" / "mixed-precision.md").exists()
    assert made.command == line("precision=fp32")


@pytest.mark.parametrize(
    ("machine", "step_ms", "since"),
    [
        (XEON, 2.0, ", since this machine has no bfloat16 units and emulates them, and saves no"),
        (H100, 2.0, ", perhaps since in a step of 2 ms casts and dispatch cost more than the units save, and saves no"),
        (H100, 20.0, " and saves no"),
    ],
)  # fmt: skip
def test_slower(tmp_path, machine, step_ms, since):
    arms = [runs(arm, machine=machine, step_ms_p50=step_ms) for arm in ("fp32", "bf16")]
    made = verdict(tmp_path, *arms, bf16=SLOWER)
    assert made.headline == "Stay with fp32 here."
    assert f"bf16 is slower here (0.75 [0.73, 0.77] times the speed of fp32){since} peak memory." in made.sentences[0]
    assert made.command == line("precision=fp32")


def test_a_peak_in_the_optimizer_is_a_reason_to_save_nothing(tmp_path):
    memory = {"phase": "optimizer"}
    made = verdict(tmp_path, runs("fp32", memory=memory), runs("bf16", memory=memory), bf16=SAME)
    assert "saves no peak memory, since the peak sits in the optimizer's step." in made.sentences[0]


def test_a_speed_that_is_not_resolved_is_benchmarked_longer(tmp_path):
    made = verdict(tmp_path, runs("fp32"), runs("bf16"), bf16=OPEN)
    assert made.headline == NONE
    assert f"(1.02 [0.95, 1.09] in 40 pairs, where about {OPEN.pairs_needed} would tell)" in made.sentences[0]
    assert made.sentences[0].endswith("; its validation loss is equivalent.")
    assert made.command.endswith("'arms=[fp32,bf16]' budget_s=3600")
    almost = verdict(tmp_path / "almost", runs("fp32"), runs("bf16"), bf16=Ratio(40, 1.06, 1.02, 1.10))
    assert almost.command.endswith("'arms=[fp32,bf16]' budget_s=120")


def test_speed_is_judged_as_a_run_feels_it_with_the_data_loader(tmp_path):
    comparison = compared(tmp_path, runs("fp32"), runs("bf16"))
    (row,) = comparison.others
    row.timing = Timing(FASTER, end_to_end=SAME, data_share=0.8)
    made = verdict_of(comparison)
    assert made.headline == "Stay with fp32 here."
    assert (
        "makes no practical difference to speed (1.00 [0.99, 1.01], where computing alone is 1.52 times as fast and "
        "data takes 80% of a step)"
    ) in made.sentences[0]


def test_what_was_not_timed_in_alternation_is_benchmarked(tmp_path):
    arms = runs("fp32"), runs("bf16"), runs("fp16", status="diverged", reason="made up")
    made = verdict(tmp_path, *arms)
    assert made.headline == NONE
    assert made.sentences[0] == (
        "bf16 was not timed in alternation with fp32 and saves no peak memory; its validation loss is equivalent."
    )
    assert made.command == shlex.join(["python", "scripts/benchmark.py", *BASE, "arms=[fp32,bf16]", "budget_s=60"])


def test_another_reference_is_told_to_the_benchmark(tmp_path):
    made = verdict(tmp_path, runs("fp16"), runs("bf16"), reference="fp16")
    assert made.command.endswith("'arms=[fp16,bf16]' reference=fp16 budget_s=60")


def test_too_few_seeds(tmp_path):
    made = verdict(tmp_path, runs("fp32", range(4)), runs("bf16", (0, 1, 2)), bf16=FASTER)
    assert made.headline == "No verdict yet on this hardware: bf16 is promising."
    assert made.sentences == [
        "bf16 is faster here (1.52 [1.48, 1.56] times the speed of fp32) and saves no peak memory; its validation loss "
        "is undecided, since a verdict takes 6 pairs at least (3 more)."
    ]
    assert made.command == line("-m", "precision=fp32,bf16", "seed=3,4,5")


def test_the_arm_s_own_settings_are_part_of_the_command(tmp_path):
    healed = runs("fp16[fp32_modules=head]", range(3), words=["precision.fp32_modules=[head]"])
    made = verdict(tmp_path, runs("fp32", range(3)), healed, **{"fp16[fp32_modules=head]": FASTER})
    assert made.command == " && ".join(
        [
            line("-m", "precision=fp32", "seed=3,4,5"),
            line("-m", "precision=fp16", "precision.fp32_modules=[head]", "seed=3,4,5"),
        ]
    )
    healed = runs("fp16[fp32_modules=head]", words=["precision.fp32_modules=[head]"])
    found = verdict(tmp_path / "untimed", runs("fp32"), healed)
    assert "'arms=[fp32,fp16[fp32_modules=head]]'" in found.command


def of_an_older_yaml(made, finished=10.0, **settings):
    """The same arm's runs under its name, from when its YAML said something else."""
    for one in made:
        one["config"]["precision"] |= settings
        one["finished"] = finished
    return made


def test_of_arms_with_one_name_the_newest_is_benchmarked(tmp_path):
    older = of_an_older_yaml(runs("bf16", range(6, 9)), init_scale=1.0)
    made = verdict(tmp_path, runs("fp32"), runs("bf16"), older)
    assert made.command.endswith("'arms=[fp32,bf16]' budget_s=60")
    assert made.sentences[-1] == (
        "The command leaves bf16[init_scale=1.0] out: arms= cannot name it, or its name means other settings by now."
    )
    twins = of_an_older_yaml(runs("fp16[init_scale=64.0]", words=["precision.init_scale=64.0"]), old=1)
    newer = runs("fp16[init_scale=64.0]", words=["precision.init_scale=64.0"])
    made = verdict(tmp_path / "twins", runs("fp32"), twins, newer)
    assert made.command.endswith("'arms=[fp32,fp16[init_scale=64.0]]' budget_s=60")
    assert "The command leaves fp16[init_scale=64.0][old=1] out" in made.sentences[-1]


def test_a_reference_with_a_twin_is_named_as_the_benchmark_knows_it(tmp_path):
    older = of_an_older_yaml(runs("fp32"), init_scale=1.0)
    found = verdict(tmp_path, runs("fp32"), older, runs("bf16"), reference="fp32[init_scale=65536.0]")
    assert found.command.endswith("'arms=[fp32,bf16]' budget_s=60")
    made = verdict(tmp_path / "other", older, runs("fp32"), runs("bf16"), reference="fp32[init_scale=1.0]")
    assert made.command == line("precision=fp32")
    assert made.sentences[-1] == (
        "The command leaves bf16 and fp32[init_scale=65536.0] out: arms= cannot name them, or their names mean other "
        "settings by now."
    )


def test_an_arm_whose_overrides_no_label_can_say_is_left_out_of_the_benchmark(tmp_path):
    odd = runs("fp16[fp32_modules=a]", words=["++precision.fp32_modules=[a]"])
    made = verdict(tmp_path, runs("fp32"), runs("bf16"), odd)
    assert made.command.endswith("'arms=[fp32,bf16]' budget_s=60")
    assert made.sentences[-1].startswith("The command leaves fp16[fp32_modules=a] out: ")


@pytest.mark.parametrize(
    ("name", "overrides", "text"),
    [
        ("bf16", [], "bf16"),
        ("fp16", ["precision.fp32_modules=[head,*.norm]"], "fp16[fp32_modules=head+*.norm]"),
        ("fp16", ["precision.fp32_modules=[]", "precision.init_scale=1e+3"], "fp16[fp32_modules=,init_scale=1e+3]"),
        ("bf16", ["precision.autocast_dtype=null"], "bf16[autocast_dtype=null]"),
        ("fp16", ["precision.fp32_modules=[a+b]"], None),
        ("fp16", ["+precision.init_scale=64"], None),
        ("fp16", ["~precision.init_scale"], None),
        ("my-arm", [], None),
    ],
)
def test_the_text_of_an_arm_says_its_overrides_or_there_is_none(name, overrides, text):
    assert arm_text(name, overrides) == text
    if text:
        (asked,) = arms_of(f"[{text}]", BASE).values()
        assert asked.precision == compose([*BASE, f"precision={name}", *overrides]).precision


def test_an_arm_without_a_completed_run_is_trained_and_not_benchmarked(tmp_path):
    failed = runs("bf16", range(3), status="failed", reason="made up") + runs("bf16", [3], status="interrupted")
    made = verdict(tmp_path, runs("fp32"), failed)
    assert made.headline == NONE
    assert made.sentences == ["bf16 has no completed run here (3 failed, 1 interrupted)."]
    assert made.command == line("-m", "precision=fp32,bf16", "seed=0,1,2,3,4,5", "rerun=failed")
    timed = verdict(tmp_path / "timed", runs("fp32"), failed, bf16=FASTER)
    assert (timed.headline, timed.command) == (NONE, made.command)
    beside = verdict(tmp_path / "beside", runs("fp32"), failed, runs("fp16"))
    assert beside.command.endswith("'arms=[fp32,fp16]' budget_s=60")
    assert beside.sentences[-1] == made.sentences[0]


@pytest.mark.parametrize(
    ("spread", "said", "seeds"),
    [
        (0.003, "undecided, about 13 more seeds would tell.", "'seed=range(6,19)'"),
        (0.01, "undecided, and more than 100 more seeds would be needed to tell.", "'seed=range(6,106)'"),
    ],
)
def test_undecided_with_the_number_of_seeds(tmp_path, spread, said, seeds):
    bf16 = [one for seed in SIX for one in runs("bf16", [seed], off=spread * (-1) ** seed)]
    made = verdict(tmp_path, runs("fp32"), bf16, bf16=FASTER)
    assert made.headline == "No verdict yet on this hardware: bf16 is promising."
    assert made.sentences[0].endswith(f"its validation loss is {said}")
    assert made.command.endswith(f"precision=fp32,bf16 {seeds}")


@pytest.mark.parametrize(
    ("off", "said"),
    [(5e-4, "equivalent, a real but negligible difference;"), (0.0, "equivalent;")],
)
def test_significant_but_negligible(tmp_path, off, said):
    made = verdict(tmp_path, runs("fp32"), runs("bf16", off=off), bf16=FASTER)
    assert made.headline == "Use bf16 here."
    assert f"its validation loss is {said}" in made.sentences[1]


def test_bit_equal(tmp_path):
    made = verdict(tmp_path, runs("fp32", val_loss_fp32=0.5), runs("tf32", val_loss_fp32=0.5), tf32=FASTER)
    assert made.headline == "Use tf32 here."
    assert "its validation loss is equivalent, equal to the last bit;" in made.sentences[1]


def test_a_diverged_arm_is_out_and_bf16_is_proposed_where_there_are_units(tmp_path):
    fp16 = runs("fp16", range(5)) + runs("fp16", [5], status="diverged", reason="made up")
    made = verdict(tmp_path, runs("fp32"), fp16, fp16=FASTER)
    assert made.headline == "Stay with fp32 here."
    assert made.sentences[0] == "On this Made-up H100 fp16 diverged in 1 of 6 runs."
    assert made.sentences[-1] == "Try bf16, which has the range of float32 and which this machine has units for."
    assert made.command == line("-m", "precision=fp32,bf16", "seed=0,1,2,3,4,5")
    other = verdict(tmp_path / "V100", runs("fp32", machine=V100), runs("fp16", machine=V100, status="diverged"))
    assert other.command == line("precision=fp32")
    assert "docs/mixed-precision.md" in other.sentences[-1]


def test_an_arm_that_ran_out_of_memory_is_out(tmp_path):
    bf16 = runs("bf16") + runs("bf16", [7], status="out_of_memory", reason="made up")
    made = verdict(tmp_path, runs("fp32"), bf16, bf16=FASTER)
    assert made.sentences == ["On this Made-up H100 bf16 ran out of memory in 1 of 7 runs."]


def test_a_reference_that_does_not_fit(tmp_path):
    fp32 = runs("fp32", range(2), status="out_of_memory", reason="made up")
    made = verdict(tmp_path, fp32, runs("bf16", range(2)), runs("tf32", range(2), step_ms_p50=9.0))
    assert made.headline == "Use bf16 here, since fp32 does not fit."
    assert made.sentences[0] == "fp32 ran out of memory on this Made-up H100, and bf16 completed 2 runs."
    assert made.command == line("precision=bf16")


def test_where_no_arm_fits_the_next_command_takes_a_batch_that_does_for_all_arms(tmp_path):
    told = "out of memory in the forward pass of step 1 at 4 GiB (batch 64); a batch of 16 fits: "
    reasons = {"fp32": "trainer.batch_size=16 trainer.accumulation=4 keeps the step", "bf16": "trainer.batch_size=32"}
    lost = [
        one
        for arm, words in reasons.items()
        for one in runs(arm, range(2), words=["trainer.batch_size=64"], status="out_of_memory", reason=told + words)
    ]
    made = verdict(tmp_path, lost)
    fits = ["trainer.batch_size=16", "trainer.accumulation=4"]
    assert made.command == line("-m", *fits, "precision=fp32,bf16", "seed=0")
    assert made.sentences == [
        "fp32, the reference arm, ran out of memory. With a batch that it fits all arms can be compared."
    ]


def test_a_missing_reference(tmp_path):
    made = verdict(tmp_path, runs("bf16", (0, 2)))
    assert made.headline == NONE
    assert made.sentences == ["fp32, the reference arm, has no completed run here, so nothing can be compared with it."]
    assert made.command == line("-m", "precision=fp32", "seed=0,2")
    failed = verdict(tmp_path / "failed", runs("bf16", (0, 2)), runs("fp32", (0, 2), status="failed"))
    assert failed.command == f"{made.command} rerun=failed"


def test_a_reference_that_diverged_is_no_question_of_precision(tmp_path):
    made = verdict(tmp_path, runs("fp32", range(2), status="diverged"), runs("bf16", range(2), status="diverged"))
    assert made.headline == NONE
    assert "fp32, the reference arm, diverged itself, so the precision is not what is wrong" in made.sentences[0]


@pytest.mark.parametrize(("machine", "arms"), [(H100, "fp32,tf32,bf16,fp16"), (V100, "fp32,fp16"), (XEON, "fp32,bf16")])
def test_a_single_arm_gets_fellows_that_the_machine_has_units_for(tmp_path, machine, arms):
    made = verdict(tmp_path, runs("fp32", range(2), machine), runs("fp32_perturbed", range(2), machine))
    assert made.headline == NONE
    assert made.sentences[0] == "fp32 alone was trained here, so there is nothing to compare it with."
    assert made.command == line("-m", f"precision={arms}", "seed=0,1,2,3,4,5")


def test_the_perturbed_arm_is_never_recommended(tmp_path):
    made = verdict(tmp_path, runs("fp32"), runs("fp32_perturbed"), runs("bf16"), fp32_perturbed=FASTER, bf16=SLOWER)
    assert made.headline == "Stay with fp32 here."
    assert not any("perturbed" in sentence for sentence in made.sentences)


def test_a_run_of_auto_and_of_one_arm_s_settings_leaves_no_precision_in_the_shared_part(tmp_path):
    arms = [runs("fp32"), runs("bf16")]
    for one in arms[1]:
        one["overrides"], one["finished"] = [*BASE, "seed=3", "check=false", "~trainer.grad_clip"], 2e6
    made = verdict_of(compared(tmp_path, *arms, bf16=FASTER))
    assert made.command == line("~trainer.grad_clip", "precision=bf16")


def test_each_hardware_has_a_verdict_of_its_own_in_all_that_is_written(tmp_path):
    for n, made in enumerate(
        one for machine in (H100, XEON) for arm in ("fp32", "bf16") for one in runs(arm, SIX, machine)
    ):
        put(tmp_path / str(n), made)
    found = read([tmp_path])
    fast, slow = compare(found)
    fast.rows[1].timing, slow.rows[1].timing = Timing(FASTER), Timing(SLOWER)
    page = files.markdown([fast, slow], found)
    first, second = page.split("\n## ")[:2]
    for part, headline in ((first, "**Use bf16 here.**"), (second, "**Stay with fp32 here.**")):
        assert headline in part.partition("| arm |")[0]
        assert "```bash\npython train.py experiment=demo name=night" in part
    written = [one["verdict"] for one in json.loads(files.as_json([fast, slow], found))["comparisons"]]
    assert [one["headline"] for one in written] == ["Use bf16 here.", "Stay with fp32 here."]
    assert all(one["command"].startswith("python train.py ") and one["sentences"] for one in written)

"""The verdict on the loss: its words, its statistics held against scipy's, and the figures beside it."""

import csv
import io
import json
import math

import numpy
import pytest
from scipy import stats

from made_up import put, result
from precision_lab.report import files
from precision_lab.report.compare import compare
from precision_lab.report.loss import MORE_SEEDS, losses_of, reaches_of, sign_flip_p, verdict
from precision_lab.report.read import read
from precision_lab.report.reading import reading

REFERENCE = 4.0
MARGIN = 0.0025 * REFERENCE  # of the made-up config
WAVE = (0.9, -1.1, 0.4, -0.6, 1.3, -0.9)  # mean 0


def compared(folder, **apart):
    """One comparison: fp32 at REFERENCE in every seed, and arms that differ from it by so much, seed by seed."""
    for arm, differences in {"fp32": [0.0] * max(map(len, apart.values())), **apart}.items():
        for seed, difference in enumerate(differences):
            put(folder / f"{arm}-{seed}", result(arm, seed, val_loss_fp32=REFERENCE + difference))
    return compare(read([folder]))[0]


def around(mean, sd):
    return [mean + sd * value / numpy.std(WAVE, ddof=1) for value in WAVE]


@pytest.mark.parametrize(
    ("apart", "word", "said"),
    [
        (around(0, 0.2 * MARGIN), "equivalent", "equivalent."),
        (around(0.5 * MARGIN, 0.2 * MARGIN), "equivalent", "equivalent, a real but negligible difference."),
        (around(-0.5 * MARGIN, 0.2 * MARGIN), "equivalent", "equivalent, a real but negligible difference."),
        ([0.0] * 6, "equivalent", "equivalent, equal to the last bit."),
        (around(3 * MARGIN, 0.2 * MARGIN), "worse", "worse (sign-flip test: p = 0.031)."),
        (around(MARGIN, 0.2 * MARGIN), "worse", "worse (sign-flip test: p = 0.031)."),
        (around(-3 * MARGIN, 0.2 * MARGIN), "better", "better (sign-flip test: p = 0.031)."),
        (around(0, 2 * MARGIN), "undecided", "undecided, about 7 more seeds would tell."),
        (around(0, 30 * MARGIN), "undecided", "undecided, and more than 100 more seeds would be needed to tell."),
        (around(3 * MARGIN, 0)[:5], "undecided", "undecided, since a verdict takes 6 pairs at least (1 more)."),
        ([0.0], "undecided", "undecided, since a verdict takes 6 pairs at least (5 more)."),
    ],
)  # fmt: skip
def test_the_words(tmp_path, apart, word, said):
    made = compared(tmp_path, bf16=apart)
    loss = losses_of(made)["bf16"]
    assert (loss.word, loss.pairs) == (word, len(apart))
    assert loss.margin == pytest.approx(MARGIN)
    assert (loss.p is None) is (len(apart) < 6)
    if "would tell" not in said:
        assert next(one for one in reading(made) if one.startswith("bf16 differs")).endswith(f": {said}")


def test_the_word_is_that_of_two_one_sided_tests_and_one_two_sided():
    """Against scipy's tests of a mean at 5 %, over cases about the margin."""
    draw = numpy.random.default_rng(0)
    seen = set()
    for _ in range(300):
        apart = list(draw.normal(draw.uniform(-2, 2), draw.uniform(0.1, 2), draw.integers(6, 20)))
        above = stats.ttest_1samp(apart, -1.0, alternative="greater").pvalue < 0.05
        below = stats.ttest_1samp(apart, 1.0, alternative="less").pvalue < 0.05
        differs = stats.ttest_1samp(apart, 0.0).pvalue < 0.05
        way = "worse" if numpy.mean(apart) > 0 else "better"
        expected = "equivalent" if above and below else way if differs else "undecided"
        assert verdict(apart, 1.0)[0] == expected
        seen.add(expected)
    assert seen == {"equivalent", "worse", "better", "undecided"}


def test_without_a_true_difference_few_arms_are_called_worse_or_better():
    draw = numpy.random.default_rng(4)
    words = [verdict(list(draw.normal(0, 1, 6)), 0.3)[0] for _ in range(1000)]
    assert 0.02 < (words.count("worse") + words.count("better")) / 1000 <= 0.06


def test_a_difference_that_one_side_alone_would_call_real_is_not(tmp_path):
    """At 90 % the interval leaves 0 out, at 95 % it does not."""
    apart = around(0.9, 1)
    assert stats.t.interval(0.9, 5, 0.9, stats.sem(apart))[0] > 0 > stats.t.interval(0.95, 5, 0.9, stats.sem(apart))[0]
    assert verdict(apart, 0.3) == ("undecided", 2)
    scaled = [value * MARGIN / 2 for value in apart]
    loss = losses_of(compared(tmp_path, bf16=scaled))["bf16"]
    assert (loss.word, loss.negligible, loss.low > 0) == ("equivalent", False, True)


def test_the_sign_flip_test_is_scipy_s():
    draw = numpy.random.default_rng(1)
    for n in (6, 7, 10):
        apart = draw.normal(0.4, 1, n)
        exact = stats.permutation_test((apart,), numpy.mean, permutation_type="samples", n_resamples=numpy.inf)
        assert sign_flip_p(list(apart)) == pytest.approx(exact.pvalue)
    assert sign_flip_p([1.0] * 6) == 2 / 2**6
    assert sign_flip_p([0.0] * 6) == 1


def test_above_sixteen_pairs_patterns_are_sampled():
    apart = list(numpy.random.default_rng(2).normal(0.4, 1, 25))
    sampled = sign_flip_p(apart)
    assert sampled == sign_flip_p(apart)  # the same every time
    assert sampled == pytest.approx(stats.ttest_1samp(apart, 0).pvalue, abs=0.02)
    assert 0 < sign_flip_p([1.0] * 30) <= 2 / 2**16


def more_seeds_by_search(apart, margin):
    """The least number of further pairs with which mean and sd as they are would decide, one by one."""
    mean, sd = abs(numpy.mean(apart)), numpy.std(apart, ddof=1)
    for more in range(1, 10_000):
        pairs = len(apart) + more
        one_sided, two_sided = (stats.t.ppf(p, pairs - 1) * sd / math.sqrt(pairs) for p in (0.95, 0.975))
        if mean + one_sided < margin or mean - two_sided > 0:
            return more
    return 10_000


def test_how_many_more_seeds():
    draw = numpy.random.default_rng(3)
    found = []
    for _ in range(200):
        apart = list(draw.normal(draw.uniform(-1, 1), draw.uniform(1, 6), 8))
        word, more = verdict(apart, 1.0)
        if word == "undecided":
            expected = more_seeds_by_search(apart, 1.0)
            assert more == (expected if expected <= MORE_SEEDS else None)
            found.append(more)
    assert None in found
    assert min(filter(None, found)) < 10


def test_the_margin_is_a_share_of_the_paired_runs_of_the_reference_arm(tmp_path):
    for seed in range(8):
        put(tmp_path / f"fp32-{seed}", result("fp32", seed, val_loss_fp32=2.0 if seed < 6 else 100.0))
    for seed in range(6):
        put(tmp_path / f"bf16-{seed}", result("bf16", seed, val_loss_fp32=2.0))
    loss = losses_of(compare(read([tmp_path]))[0])["bf16"]
    assert (loss.pairs, loss.margin) == (6, pytest.approx(0.005))


def with_curve(arm, seed, losses, steps=None, **words):
    steps = steps or [100 * (n + 1) for n in range(len(losses))]
    curve = {"step": steps, "train_s": [step / 50 for step in steps], "val_loss_fp32": losses}
    return result(arm, seed, curve=curve, val_loss_fp32=losses[-1], **words)


def test_the_area_between_curves_is_the_mean_log_ratio_over_evaluations(tmp_path):
    falling = [4.0, 2.0, 1.0, 0.5]
    for seed in range(3):
        slower = [loss * (1 + 0.02 * (n < 3) + 0.001 * seed) for n, loss in enumerate(falling)]  # catches up
        put(tmp_path / f"fp32-{seed}", with_curve("fp32", seed, falling))
        put(tmp_path / f"bf16-{seed}", with_curve("bf16", seed, slower))
        put(tmp_path / f"fp16-{seed}", with_curve("fp16", seed, falling, [100, 200, 300, 410]))
        put(tmp_path / f"tf32-{seed}", with_curve("tf32", seed, [4.0, None, 1.0, 0.5] if seed else falling))
    losses = losses_of(compare(read([tmp_path]))[0])
    each = [numpy.mean([100 * math.log(1 + 0.02 * (n < 3) + 0.001 * seed) for n in range(4)]) for seed in range(3)]
    area = losses["bf16"].area
    assert (area.pairs, area.mean) == (3, pytest.approx(numpy.mean(each)))
    low, high = stats.t.interval(0.95, 2, numpy.mean(each), stats.sem(each))
    assert (area.low, area.high) == (pytest.approx(low), pytest.approx(high))
    assert losses["fp16"].area is None  # evaluated at other steps
    assert losses["tf32"].area is None  # one evaluation was not finite


def test_steps_and_time_to_the_reference_run_s_final_loss_of_the_same_seed(tmp_path):
    finals = (0.5, 5.0, 0.05)  # which of the seeds is an easy one must not count
    for seed, final in enumerate(finals):
        put(tmp_path / f"fp32-{seed}", with_curve("fp32", seed, [40.0, 2 * final, final]))
        losses = ([40.0, 0.9, 0.99], [1.0, 0.5, 0.4], [40.0, 2.0, 1.0024])[seed]  # of the seed's own target
        put(tmp_path / f"bf16-{seed}", with_curve("bf16", seed, [final * loss for loss in losses]))
        lost = {"status": "diverged", "reason": "made up"} if seed else {}
        put(tmp_path / f"fp16-{seed}", with_curve("fp16", seed, [0.04, 0.04, 0.04], **lost))  # below at first
    put(tmp_path / "bf16-3", with_curve("bf16", 3, [0.01, 0.01, 0.01]))  # without a partner
    put(tmp_path / "tf32-0", result("tf32", 0))  # evaluated twice: no more than its end
    reaches = reaches_of(compare(read([tmp_path]))[0])
    assert set(reaches) == {"fp32", "bf16", "fp16"}
    assert reaches["fp32"].targets == {seed: pytest.approx(1.0025 * final) for seed, final in enumerate(finals)}
    assert (reaches["fp32"].steps, reaches["fp32"].reached, reaches["fp32"].runs) == (300, 3, 3)
    assert (reaches["bf16"].steps, reaches["bf16"].train_s, reaches["bf16"].reached) == (200, 4.0, 3)
    assert (reaches["fp16"].steps, reaches["fp16"].reached, reaches["fp16"].runs) == (None, 1, 3)


def test_steps_and_seconds_to_the_target_are_of_one_run(tmp_path):
    """Of an even number the lower middle one, by seconds; a slow run may be the one of the fewest steps."""
    for seed, (at, pace) in enumerate([(100, 0.09), (200, 0.01), (200, 0.02), (300, 0.02)]):
        put(tmp_path / f"fp32-{seed}", with_curve("fp32", seed, [4.0, 3.0, 0.5]))
        made = with_curve("bf16", seed, [0.5 if step >= at else 4.0 for step in (100, 200, 300)])
        made["curve"]["train_s"] = [pace * step for step in (100, 200, 300)]  # reached at 9, 2, 4 and 6 s
        put(tmp_path / f"bf16-{seed}", made)
    reach = reaches_of(compare(read([tmp_path]))[0])["bf16"]
    assert (reach.steps, reach.train_s, reach.reached) == (200, 4.0, 4)


def test_an_arm_that_always_diverged_never_came_to_the_target(tmp_path):
    for seed in range(2):
        put(tmp_path / f"fp32-{seed}", with_curve("fp32", seed, [4.0, 3.0, 0.5]))
        put(tmp_path / f"fp16-{seed}", with_curve("fp16", seed, [None], status="diverged", reason="made up"))
    reach = reaches_of(compare(read([tmp_path]))[0])["fp16"]
    assert (reach.steps, reach.train_s, reach.reached, reach.runs) == (None, None, 0, 2)


def test_the_floor_of_chance_stands_beside_the_arms(tmp_path):
    made = compared(tmp_path, fp32_perturbed=around(0, 0.001), bf16=around(0, 0.003))
    said = reading(made)[-1]
    assert said.startswith(
        "Weights changed in their last bits alone drive runs of one seed apart by an sd of 0.001 for fp32_perturbed, "
        "and 0.003 for bf16; r is"
    )
    assert losses_of(made)["bf16"].correlation is None  # the reference arm does not vary here
    for seed in range(6):
        for arm, own in (("fp32", 0), ("bf16", 0.2 * (-1) ** seed)):
            put(tmp_path / "r" / f"{arm}-{seed}", result(arm, seed, val_loss_fp32=4 + 0.1 * seed + own))
    loss = losses_of(compare(read([tmp_path / "r"]))[0])["bf16"]
    first = [0.1 * seed for seed in range(6)]
    second = [0.1 * seed + 0.2 * (-1) ** seed for seed in range(6)]
    assert loss.correlation == pytest.approx(stats.pearsonr(first, second).statistic)
    assert not any("last bits" in one for one in reading(compare(read([tmp_path / "r"]))[0]))


def test_all_figures_are_in_the_files(tmp_path):
    for seed in range(6):
        for arm, own in (("fp32", 0.0), ("bf16", 0.02)):
            losses = [(1 + own) * loss for loss in (4.0, 2.0, 1.0 + 0.01 * seed)]
            put(tmp_path / f"{arm}-{seed}", with_curve(arm, seed, losses, spike_score=0.01))
    found = read([tmp_path])
    made = compare(found)
    fp32, bf16 = csv.DictReader(io.StringIO(files.as_csv(made)))
    assert (fp32["loss_verdict"], bf16["loss_verdict"]) == ("", "worse")
    assert float(bf16["loss_verdict_p"]) == 2 / 64
    assert float(bf16["curve_percent"]) == pytest.approx(100 * math.log(1.02))
    assert (float(fp32["target_steps"]), bf16["target_steps"], bf16["target_reached"]) == (300, "", "0")
    assert float(bf16["spike_score_mean"]) == 0.01
    arm = json.loads(files.as_json(made, found))["comparisons"][0]["arms"][1]
    assert (arm["loss_verdict"]["word"], arm["loss_verdict"]["pairs"]) == ("worse", 6)
    assert (arm["target"]["reached"], arm["target"]["targets"]["5"]) == (0, pytest.approx(1.05 * 1.0025))


@pytest.mark.parametrize(
    "verdict_config", [None, 5, {}, {"loss_margin": "0.1"}, {"loss_margin": None}, {"loss_margin": 0}]
)
def test_a_result_without_a_margin_is_no_use_and_may_be_of_an_older_version(tmp_path, verdict_config):
    made = result()
    made["config"]["verdict"] = verdict_config
    put(tmp_path / "0", made)
    assert read([tmp_path]).skipped[0][1] == (
        "result.json is damaged, or of an older version: verdict.loss_margin is missing or of a wrong type"
    )

"""Which runs stand in one table, and the figures of an arm by itself and beside the reference arm."""

import json
import math

import pytest

from made_up import H100, V100, XEON, put, result
from precision_lab.errors import InputError
from precision_lab.report.compare import SORTS, compare, interval
from precision_lab.report.read import read


def of(folder, made, **words):
    """The comparisons of some results."""
    for number, one in enumerate(made):
        put(folder / str(number), one)
    return compare(read([folder]), **words)


def arms(comparison):
    return [row.arm for row in comparison.rows]


def row(comparison, arm):
    return next(row for row in comparison.rows if row.arm == arm)


def fleet():
    """Three kinds of hardware, three arms, three seeds."""
    speeds = {"fp32": 4.0, "bf16": 2.0, "fp16": 1.0}
    for machine in (H100, V100, XEON):
        for arm, step_ms in speeds.items():
            for seed in range(3):
                loss = 0.5 + 0.1 * seed + (0.0 if arm == "fp32" else 0.01 * (seed - 1))
                slow = {"Made-up H100": 1, "Made-up V100": 2, "Made-up Xeon": 100}[machine["model"]]
                yield result(
                    arm, seed, machine, step_ms_p50=step_ms * slow * (1 + 0.1 * seed), val_loss_fp32=loss,
                    saved_activations_mib=100.0 if arm == "fp32" else 60.0,
                )  # fmt: skip


def test_a_table_for_each_kind_of_hardware_and_a_row_an_arm(tmp_path):
    made = of(tmp_path, fleet())
    assert [one.fingerprint["model"] for one in made] == ["Made-up H100", "Made-up V100", "Made-up Xeon"]
    for one, slow in zip(made, (1, 2, 100), strict=True):
        assert arms(one) == ["fp32", "bf16", "fp16"]
        assert {row.statuses.total() for row in one.rows} == {3}
        bf16 = row(one, "bf16")
        step = bf16.figures["step_ms"]
        assert (step.n, step.median, step.low, step.high) == (3, 2.2 * slow, 2.0 * slow, 2.4 * slow)
        speed = bf16.against["speed_ratio"]
        assert (speed.pairs, speed.mean) == (3, pytest.approx(2.0))
        assert speed.low == pytest.approx(2.0)  # the seeds slow both arms alike
        assert row(one, "fp16").against["speed_ratio"].mean == pytest.approx(4.0)
        assert bf16.against["saved_ratio"].mean == pytest.approx(0.6)
        assert bf16.against["peak_ratio"].mean == 1.0
        assert bf16.figures["val_loss_fp32"].mean == pytest.approx(0.6)
        assert row(one, "fp32").against == {}


def test_a_difference_is_of_the_pairs_of_one_seed_with_student_s_interval(tmp_path):
    one = of(tmp_path, [one for one in fleet() if one["fingerprint"] == XEON])[0]
    difference = row(one, "bf16").against["loss_difference"]
    # -0.01, 0, 0.01: mean 0, sd 0.01; Student's t of 0.975 with two degrees of freedom is 4.3027
    assert difference.pairs == 3
    assert difference.mean == pytest.approx(0.0, abs=1e-12)
    assert difference.high == pytest.approx(4.3027 * 0.01 / math.sqrt(3), rel=1e-4)
    assert difference.low == pytest.approx(-difference.high)


@pytest.mark.parametrize(
    ("values", "expected"),
    [([1.0, 3.0], (2.0, 2 - 12.7062, 2 + 12.7062)), ([2.0] * 4, (2.0, 2.0, 2.0))],
)
def test_the_interval(values, expected):
    assert interval(values) == pytest.approx(expected, rel=1e-5)


def test_one_value_has_no_interval():
    assert interval([3.0]) == (3.0, None, None)


def test_a_ratio_is_a_geometric_mean_with_the_interval_of_its_logarithm(tmp_path):
    made = [result("fp32", seed, step_ms_p50=8.0) for seed in (0, 1)]
    made += [result("bf16", 0, step_ms_p50=4.0), result("bf16", 1, step_ms_p50=1.0)]  # 2 and 8 times as fast
    speed = row(of(tmp_path, made)[0], "bf16").against["speed_ratio"]
    assert speed.mean == pytest.approx(4.0)
    assert (speed.low, speed.high) == pytest.approx((4 * 2**-12.7062, 4 * 2**12.7062), rel=1e-4)


def test_only_shared_seeds_make_pairs_and_all_runs_make_figures(tmp_path):
    made = [result("fp32", seed) for seed in (0, 1)] + [result("bf16", seed) for seed in (1, 2, 3)]
    bf16 = row(of(tmp_path, made)[0], "bf16")
    assert bf16.figures["val_loss_fp32"].n == 3
    assert bf16.against["loss_difference"].pairs == 1
    assert bf16.against["loss_difference"].low is None


def test_the_newest_of_two_completed_runs_of_an_arm_and_seed_counts(tmp_path):
    made = [result(finished=5.0, val_loss_fp32=0.1), result(finished=9.0, val_loss_fp32=0.9)]
    made += [result(finished=7.0, val_loss_fp32=0.7), result(finished=11.0, status="failed")]
    fp32 = row(of(tmp_path, made)[0], "fp32")
    assert [run.finished for run in fp32.counted] == [9.0]
    assert fp32.figures["val_loss_fp32"].mean == 0.9
    assert fp32.statuses == {"completed": 1, "failed": 1}
    assert [run.finished for run in fp32.superseded] == [5.0, 7.0]


def test_figures_are_of_completed_runs_and_statuses_of_all(tmp_path):
    made = [result("fp16", 0, val_loss_fp32=0.25), result("fp16", 1, status="diverged", val_loss_fp32=None)]
    made += [result("fp16", 2, status="out_of_memory"), result("fp16", 3, status="interrupted", val_loss_fp32=9.0)]
    fp16 = row(of(tmp_path, made)[0], "fp16")
    assert fp16.statuses == {"completed": 1, "diverged": 1, "out_of_memory": 1, "interrupted": 1}
    assert (fp16.figures["val_loss_fp32"].n, fp16.figures["val_loss_fp32"].mean) == (1, 0.25)


def test_skipped_steps_and_loss_scale_are_of_diverged_runs_too(tmp_path):
    ends = {"status": "diverged", "skipped_steps": 51, "loss_scale": 0.5, "val_loss_fp32": 9.0}
    fp16 = row(
        of(tmp_path, [result("fp16", 0), result("fp16", 1, **ends), result("fp16", 2, status="failed")])[0], "fp16"
    )
    assert (fp16.figures["skipped_steps"].n, fp16.figures["skipped_steps"].high) == (2, 51)
    assert fp16.figures["loss_scale"].low == 0.5
    assert fp16.figures["val_loss_fp32"].n == 1


def test_a_figure_that_a_run_lacks_is_left_out_and_one_of_nought_has_no_ratio(tmp_path):
    made = [result("fp32", saved_activations_mib=0.0), result("bf16", peak_allocated_gib=None)]
    bf16 = row(of(tmp_path, made)[0], "bf16")
    assert "peak_allocated_gib" not in bf16.figures
    assert set(bf16.against) == {"speed_ratio", "loss_difference"}


def test_an_arm_that_does_not_scale_has_no_loss_scale(tmp_path):
    one = of(tmp_path, [result("fp32"), result("fp16", loss_scale=1024.0)])[0]
    assert "loss_scale" not in row(one, "fp32").figures
    assert row(one, "fp16").figures["loss_scale"].mean == 1024.0


def test_another_arm_may_be_the_reference_and_it_stands_first(tmp_path):
    one = of(tmp_path, [result("fp32", step_ms_p50=4.0), result("bf16", step_ms_p50=2.0)], reference="bf16")[0]
    assert arms(one) == ["bf16", "fp32"]
    assert row(one, "fp32").against["speed_ratio"].mean == 0.5
    assert row(one, "bf16").is_reference


@pytest.mark.parametrize("made", [[result("bf16"), result("fp16")], [result("fp32", status="failed"), result("bf16")]])
def test_without_a_completed_run_of_the_reference_arm_there_are_no_ratios(tmp_path, made):
    one = of(tmp_path, made)[0]
    assert one.reference is None
    assert [row.against for row in one.rows] == [{}, {}]


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({"experiment_signature": "99999999", "config": {"trainer": {"steps": 300, "epochs": None}}},
         {"trainer.steps": (200, 300), "trainer.batch_size": (64, None)}),
        ({"hashes": {"data": "other"}}, {"data": ("dada", "other")}),
        ({"fingerprint": {"threads": 2}}, {"threads": (1, 2)}),
    ],
)  # fmt: skip
def test_runs_that_are_not_comparable_have_tables_of_their_own_that_say_which_keys_differ(tmp_path, changes, keys):
    made = of(tmp_path, [result(), result(**changes)])
    assert [len(one.runs) for one in made] == [1, 1]
    assert made[0].differs == {}
    assert made[1].differs == keys
    assert made[1].akin is (list(keys) == ["threads"])


def test_what_is_no_part_of_the_identity_keeps_nothing_apart(tmp_path):
    other = result("bf16", seed=1, host="there")
    other["config"] |= {"name": "day", "tags": ["a"]}
    other["config"]["trainer"]["log_every"] = 1
    other["config"]["device"]["threads"] = 7
    (one,) = of(tmp_path, [result(), other])
    assert arms(one) == ["fp32", "bf16"]
    assert "trainer.log_every" not in one.config
    assert one.name == "day"  # the newest run's


def test_a_run_that_failed_before_its_data_was_read_stands_with_its_fellows(tmp_path):
    failed = result("bf16", status="failed")
    failed["hashes"] = {}
    (one,) = of(tmp_path, [failed, result("fp32", 1)])
    assert row(one, "bf16").statuses == {"failed": 1}
    assert one.data == "dada"


def test_arms_of_one_label_that_differ_are_two(tmp_path):
    changed = result("fp16", 1)
    changed["config"]["precision"]["init_scale"] = 1024.0  # the YAML was changed in between
    one = of(tmp_path, [result("fp16", 0), changed])[0]
    assert sorted(arms(one)) == ["fp16[init_scale=1024.0]", "fp16[init_scale=65536.0]"]
    healed = [result("fp16"), result("fp16[fp32_modules=attn]")]
    healed[1]["config"]["precision"]["fp32_modules"] = ["attn"]
    assert arms(of(tmp_path / "healed", healed)[0]) == ["fp16", "fp16[fp32_modules=attn]"]


@pytest.mark.parametrize(
    ("sort", "order"),
    [
        (None, ["fp32", "tf32", "bf16", "fp16"]),
        ("step_ms", ["fp16", "tf32", "fp32", "bf16"]),
        ("speed_ratio", ["fp16", "tf32", "fp32", "bf16"]),
        ("val_loss_fp32", ["bf16", "fp32", "tf32", "fp16"]),
        ("loss_difference", ["bf16", "fp32", "tf32", "fp16"]),
        ("peak_allocated_gib", ["fp32", "tf32", "bf16", "fp16"]),
    ],
)
def test_rows_are_sorted_the_better_first(tmp_path, sort, order):
    made = [result("fp16", step_ms_p50=1.0, val_loss_fp32=9.0), result("bf16", step_ms_p50=5.0, val_loss_fp32=0.1)]
    made += [result("tf32", step_ms_p50=3.0, val_loss_fp32=0.6), result("fp32", step_ms_p50=4.0, val_loss_fp32=0.5)]
    assert arms(of(tmp_path, made, sort=sort)[0]) == order


@pytest.mark.parametrize("sort", SORTS)
def test_an_arm_without_the_figure_stands_last(tmp_path, sort):
    assert arms(of(tmp_path, [result("fp32", status="failed"), result("bf16", 1), result("fp16", 1)], sort=sort)[0])[
        -1
    ] in ("fp32", "fp16")


def test_figures_that_lie_far_apart_have_an_interval_all_the_same(tmp_path):
    made = [result(arm, seed, step_ms_p50=ms) for arm, seed, ms in (("fp32", 0, 1.0), ("fp32", 1, 1e60))]
    made += [result("bf16", seed, step_ms_p50=ms) for seed, ms in ((0, 1e-90), (1, 1.0))]
    speed = row(of(tmp_path, made)[0], "bf16").against["speed_ratio"]
    assert (speed.pairs, speed.low < speed.mean < speed.high) == (2, True)


def test_arms_of_one_label_are_two_across_hardware_as_well_and_never_share_a_label(tmp_path):
    low, high, own = (result("fp16", machine=machine) for machine in (XEON, H100, H100))
    high["config"]["precision"]["init_scale"] = 2.0
    own["arm"], own["config"]["precision"]["init_scale"] = "fp16[init_scale=2.0]", 4.0
    assert [arms(one) for one in of(tmp_path, [low, high, own])] == [
        ["fp16[init_scale=2.0]", "fp16[init_scale=2.0]'"], ["fp16[init_scale=65536.0]"]
    ]  # fmt: skip


def test_rows_are_sorted_by_the_median_that_is_shown(tmp_path):
    made = [result("fp32", seed, step_ms_p50=ms) for seed, ms in enumerate((1.0, 1.0, 100.0))]
    assert arms(of(tmp_path, [*made, result("bf16", step_ms_p50=2.0)], sort="step_ms")[0]) == ["fp32", "bf16"]


def test_the_newest_run_speaks_for_the_machine_whatever_its_arm(tmp_path):
    made = [
        result("bf16", finished=9.0, versions={"torch": "2.14"}),
        result("fp32", finished=5.0, versions={"torch": "2.11"}),
    ]
    for reference in ("fp32", "bf16"):
        assert of(tmp_path / reference, made, reference=reference)[0].newest.versions["torch"] == "2.14"


def test_two_arms_of_one_label_of_which_one_has_a_key_more(tmp_path):
    more = result("fp16", 1)
    more["config"]["precision"]["new_key"] = 5
    assert sorted(arms(of(tmp_path, [result("fp16"), more])[0])) == ["fp16[new_key=5]", "fp16[new_key=None]"]


def test_without_a_result_or_with_a_reference_that_no_run_has_there_is_nothing_to_compare(tmp_path):
    with pytest.raises(InputError, match=r"There is no result in .*; train something first\."):
        compare(read([tmp_path]))
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "result.json").touch()
    with pytest.raises(InputError, match=r"There is no result in .* \(1 left out, .*0: result.json is empty\); train"):
        compare(read([tmp_path]))
    with pytest.raises(InputError, match="--reference fp8 is no arm of these runs; they have fp32"):
        of(tmp_path / "more", [result()], reference="fp8")


def test_a_column_that_is_none_is_refused(tmp_path):
    with pytest.raises(InputError, match="--sort speed is no column; valid are step_ms, samples_per_s, speed_ratio"):
        of(tmp_path, [result()], sort="speed")


def test_a_label_is_kept_as_it_is(tmp_path):
    made = result("fp16[fp32_modules=a,b]")
    assert json.loads(json.dumps(arms(of(tmp_path, [made])[0]))) == ["fp16[fp32_modules=a,b]"]

"""Ratios of paired times: the estimate, how often its interval holds the truth, and the words."""

import math

import numpy
import pytest

from precision_lab.ratios import MARGIN, Ratio, ratio_of


def test_the_ratio_is_exp_of_the_median_logarithm_of_all_pairs():
    sittings = [[0.1, 0.2, 0.9], [0.3, 0.4], [0.2, 0.3]]
    assert ratio_of(sittings).value == pytest.approx(math.exp(0.3))
    assert ratio_of(sittings).pairs == 7
    assert ratio_of([[0.1, 0.2], [0.3, 0.4]]).value == pytest.approx(math.exp(0.25))


def test_the_interval_is_that_of_a_plain_bootstrap_over_sittings():
    """Computed once more by drawing sittings one by one."""
    draw = numpy.random.default_rng(5)
    sittings = [list(draw.normal(0.1, 0.05, size=int(draw.integers(3, 9)))) for _ in range(12)]
    medians = [
        numpy.median(numpy.concatenate([sittings[i] for i in draw.integers(12, size=12)])) for _ in range(20_000)
    ]
    estimate = numpy.median(numpy.concatenate(sittings))
    stretch = math.sqrt(12 / 11) * 2.200985 / 1.96  # Student's t of 11 degrees of freedom
    low, high = (estimate + (end - estimate) * stretch for end in numpy.quantile(medians, (0.025, 0.975)))
    found = ratio_of(sittings)
    assert (math.log(found.low), math.log(found.high)) == pytest.approx((low, high), abs=0.004)
    assert ratio_of(sittings) == found  # no chance in what is printed


@pytest.mark.parametrize(("sittings", "pairs", "between"), [(5, 8, 0.0), (8, 10, 0.02), (20, 8, 0.01)])
def test_the_interval_holds_the_truth_about_as_often_as_it_says(sittings, pairs, between):
    """Heavy tails within a sitting, and a spread between sittings that no number of pairs in one would show."""
    draw = numpy.random.default_rng(1)
    held = 0
    for _ in range(200):
        made = [draw.normal(0, between) + 0.05 * draw.standard_t(2, size=pairs) for _ in range(sittings)]
        ratio = ratio_of(made)
        held += ratio.low <= 1 <= ratio.high
    assert held >= 176  # of 200; 1,000 tries of each gave 92 to 94 %


def test_of_one_sitting_the_pairs_are_drawn():
    one = ratio_of([[0.0, 0.01, -0.01, 0.02, 0.0, 0.01, -0.02, 0.01]])
    assert one.low < one.value < one.high
    with pytest.raises(ValueError, match="one pair has no interval"):
        ratio_of([[0.1]])


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [
        (1.0251, 1.2, "faster"),
        (1.0249, 1.2, "not resolved"),
        (0.8, 0.9749, "slower"),
        (0.8, 0.9751, "not resolved"),
        (0.976, 1.024, "no practical difference"),
        (0.974, 1.024, "not resolved"),
        (0.5, 2.0, "not resolved"),
    ],
)
def test_words_go_by_the_whole_interval(low, high, word):
    assert Ratio(50, math.sqrt(low * high), low, high).word == word
    assert MARGIN == 0.025


def test_pairs_needed_grow_with_the_square_of_what_sticks_out_over_the_room():
    faster = Ratio(100, 1.075, 0.975, 1.2)  # 0.1 below the estimate, of which 0.05 is room
    assert faster.pairs_needed == 400
    slower = Ratio(100, 0.925, 0.9, 1.025)  # 0.1 above, room 0.05
    assert slower.pairs_needed == 400
    same = Ratio(100, 1.0, 0.98, 1.05)  # twice the margin above
    assert same.pairs_needed == 400
    lopsided = Ratio(23, 0.921, 0.902, 0.978)
    assert lopsided.word == "not resolved"
    assert lopsided.pairs_needed > 23
    on_the_margin = Ratio(100, 1.025, 1.015, 1.035)
    assert 100 < on_the_margin.pairs_needed < 1000
    assert Ratio(100, 1.2, 1.19, 1.21).pairs_needed == 100

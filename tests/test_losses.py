"""The spike score and the validation curve that a run keeps."""

import math

import numpy
import pytest

from precision_lab.losses import POINTS, Curve, Spikes


def score_of(losses, window=50):
    spikes = Spikes()
    for start in range(0, len(losses), window):
        spikes.add(numpy.asarray(losses[start : start + window], dtype="float64"))
    return spikes.score


def by_the_book(losses):
    """Step by step, with no sum carried along."""
    finite = [value for value in losses if math.isfinite(value)]
    judged = [(value, numpy.array(finite[max(0, n - 1000) : n])) for n, value in enumerate(finite) if n >= 100]
    return sum(value >= before.mean() + 7 * before.std() for value, before in judged) / len(judged)


@pytest.mark.parametrize("window", [1, 50, 333, 5000])
def test_the_score_is_the_share_of_losses_seven_sd_above_the_thousand_before(window):
    draw = numpy.random.default_rng(0)
    losses = 3 * numpy.exp(-numpy.arange(2500) / 700) + 0.02 * draw.standard_normal(2500)
    high = draw.choice(numpy.arange(100, 2500), 25, replace=False)
    losses[high] += draw.uniform(0.5, 9.0, 25)
    losses[draw.choice(2500, 20, replace=False)] = math.nan
    expected = by_the_book(losses)
    assert 0.002 < expected < 0.01
    assert score_of(losses, window) == pytest.approx(expected)


def test_a_jump_before_the_hundred_and_first_loss_is_not_judged():
    draw = numpy.random.default_rng(1)
    losses = 2 + 0.01 * draw.standard_normal(101)
    assert score_of(losses[:100]) is None
    assert score_of(losses) == 0
    losses[-1] = 3
    assert score_of(losses) == 1
    losses[[50, -1]] = 3, 2
    assert score_of(losses) == 0


@pytest.mark.parametrize("value", [2.3, 1e30, 0.0, -5.0])
def test_a_loss_that_stands_still_has_no_spikes(value):
    assert score_of([value] * 400) == 0


def test_losses_that_are_not_finite_are_left_out():
    assert score_of([math.nan] * 500) is None
    assert score_of([2.0, math.inf] * 60) is None  # 60 are finite


def test_a_curve_keeps_its_first_its_last_and_evenly_chosen_points_between():
    curve = Curve()
    assert curve.stored() == {"step": [], "train_s": [], "val_loss_fp32": []}
    for step in range(1, POINTS + 1):
        curve.add(step, step / 8, 1 / step)
    assert curve.stored()["step"] == list(range(1, POINTS + 1))
    for step in range(POINTS + 1, 1001):
        curve.add(step, step / 8, math.nan if step == 1000 else 1 / step)
    kept = curve.stored()
    assert len(kept["step"]) == POINTS
    assert (kept["step"][0], kept["step"][-1]) == (1, 1000)
    assert {b - a for a, b in zip(kept["step"], kept["step"][1:], strict=False)} <= {10, 11}
    assert kept["val_loss_fp32"][-1] is None
    assert kept["train_s"][-1] == 125

"""Bands, importance and Pareto fronts, compared with NumPy, with another formula, and with brute force."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import r2_score

from exp.extras.report.analysis import LEAST_RUNS, band, numbers, pareto_front, ranks, share_explained


def curve(steps, values):
    return np.array(steps, np.int64), np.array(values, np.float64)


def test_a_band_is_a_mean_and_a_sample_deviation():
    drawn = np.random.default_rng(0).normal(size=(5, 7))
    found = band([curve(range(0, 70, 10), values) for values in drawn])
    assert found.count == 5
    assert found.steps.tolist() == list(range(0, 70, 10))
    np.testing.assert_allclose(found.mean, drawn.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(found.deviation, drawn.std(axis=0, ddof=1), rtol=1e-12)
    # Curves are interpolated at the steps that all of them span.
    found = band([curve([0, 10, 20], [0, 10, 0]), curve([5, 15, 40], [1, 1, 1])])
    assert found.steps.tolist() == [5, 10, 15, 20]
    np.testing.assert_allclose(found.mean, [3, 5.5, 3, 0.5], rtol=1e-12)
    assert band([curve([0, 1], [1, 1]), curve([2, 3], [1, 1])]) is None
    assert band([curve([], [])]) is None
    # A value that is not finite leaves a gap.
    found = band([curve([0, 1, 2], [1, np.inf, 3]), curve([0, 1, 2], [1, 1, 5])])
    assert np.isnan(found.mean).tolist() == [False, True, False]
    assert (found.mean[2], found.deviation[2]) == (4, pytest.approx(np.sqrt(2)))
    alone = band([curve([3, 4], [1, 2])])
    assert alone.mean.tolist() == [1, 2]
    assert np.isnan(alone.deviation).all()


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=25))
def test_no_point_dominates_a_front(found):
    points, modes = np.array(found, np.float64), ("min", "max", "min")

    def dominates(one, other) -> bool:
        better = [a < b if mode == "min" else a > b for a, b, mode in zip(one, other, modes, strict=True)]
        as_good = [a <= b if mode == "min" else a >= b for a, b, mode in zip(one, other, modes, strict=True)]
        return all(as_good) and any(better)

    expected = [not any(dominates(other, point) for other in points) for point in points]
    assert pareto_front(points, modes).tolist() == expected
    assert any(expected)


def grid(seeds: int = 4):
    return list(itertools.product(["a", "b", "c"], ["1e-3", "1e-2"], map(str, range(seeds))))


def test_a_key_that_decides_the_value_explains_all():
    runs = grid()
    values = [{"a": 1.0, "b": 5.0, "c": 2.0}[name] for name, _, _ in runs]
    assert share_explained([name for name, _, _ in runs], values) == pytest.approx(1.0)
    assert share_explained([rate for _, rate, _ in runs], values) == 0.0
    assert share_explained([seed for _, _, seed in runs], values) == 0.0


def test_chance_and_scale_do_not_change_a_share():
    drawn = random.Random(0)
    found = [share_explained([drawn.choice("abcd") for _ in range(24)], [drawn.random() for _ in range(24)])
             for _ in range(200)]  # fmt: skip
    assert np.mean(found) < 0.06  # eta squared itself has 3 / 23 on average
    runs = grid()
    values = [float(rate) * (1 + int(seed)) for _, rate, seed in runs]
    texts = [rate for _, rate, _ in runs]
    assert share_explained(texts, values) == pytest.approx(share_explained(texts, [np.exp(900 * v) for v in values]))


def test_a_share_is_an_adjusted_r_squared():
    """Kelley's epsilon squared is the adjusted coefficient of determination of a regression on groups."""
    drawn = random.Random(1)
    texts = [drawn.choice("abc") for _ in range(40)]
    values = [drawn.random() + 0.4 * (text == "b") for text in texts]
    ranked = ranks(np.array(values))
    means = [ranked[[other == text for other in texts]].mean() for text in texts]
    expected = 1 - (1 - r2_score(ranked, means)) * (40 - 1) / (40 - 3)
    assert share_explained(texts, values) == pytest.approx(expected, rel=1e-12)


def test_many_numbers_are_binned():
    rates = [repr(10 ** (-5 + place / 16)) for place in range(64)]
    assert share_explained(rates, [float(rate) for rate in rates]) > 0.9
    pairs = list(itertools.product("01", "01", range(4)))
    assert share_explained([one for one, _, _ in pairs], [float(one != other) for one, other, _ in pairs]) == 0.0


def test_too_few_runs_have_no_share():
    assert share_explained(["a", "b"] * 3, [1.0, 2.0] * 3) is None
    assert LEAST_RUNS == 8
    assert share_explained(["a"] * 9, list(map(float, range(9)))) is None
    assert share_explained(list("abcdefghi"), list(map(float, range(9)))) is None
    assert share_explained(["a", "b"] * 5, [1.0] * 10) is None


def test_equal_values_share_a_rank():
    assert ranks(np.array([3.0, 1.0, 3.0, 2.0])).tolist() == [3.5, 1.0, 3.5, 2.0]
    assert numbers(["1e-3", "2"]).tolist() == [0.001, 2.0]
    assert numbers(["1", "adam"]) is None
    assert numbers(["1", "nan"]) is None
    assert numbers([]) is None

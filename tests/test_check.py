"""Checks of arguments: what passes, and that the rest is refused by the right error."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import ldlt
from ldlt import check


def test_what_passes_comes_back_in_its_type():
    for value in (2, 2.0, np.float32(2), torch.tensor(2.0)):
        found = check.positive("x", value)
        assert (found, type(found)) == (2.0, float)
    for value in (3, np.int64(3)):
        found = check.whole("x", value)
        assert (found, type(found)) == (3, int)
    assert check.whole("x", 0, least=0) == check.finite("x", 0, least=0) == 0
    assert check.choice("x", False, ("a", False)) is False
    for shape in (4, (4,), [4], np.array([4]), torch.Size([4])):
        assert check.sample_shape(shape) == (4,)


@pytest.mark.parametrize("value", [0, -1.0, math.inf, math.nan, "1", True, None, torch.ones(2), [1.0]])
def test_what_is_not_positive(value):
    with pytest.raises(ldlt.BoundError, match="bound"):
        check.positive("bound", value, ldlt.BoundError)


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "1", None])
def test_what_is_not_a_positive_whole_number(value):
    with pytest.raises(ldlt.OptionError, match="steps"):
        check.whole("steps", value)


def test_ends_are_in_or_out():
    for value in (0.0, 1.0):
        with pytest.raises(ldlt.OptionError):
            check.finite("share", value, above=0.0, below=1.0)
    with pytest.raises(ldlt.OptionError):
        check.finite("margin", -1e-300, least=0.0)


@pytest.mark.parametrize("value", ["paed", 1, True, None])
def test_choices_of_their_type_with_the_nearest_one(value):
    with pytest.raises(ldlt.OptionError) as caught:
        check.choice("mode", value, ("pad", "crop", 0))
    assert ("did you mean 'pad'" in str(caught.value)) == (value == "paed")


@pytest.mark.parametrize("shape", [0, -1, (), (2, 0), (2.5,), "4", None, (2, "b"), 1.5])
def test_shapes_that_are_none(shape):
    with pytest.raises(ldlt.ShapeError):
        check.sample_shape(shape)

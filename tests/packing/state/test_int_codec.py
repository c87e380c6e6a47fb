"""Integers survive a round trip through text, and other text is rejected."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from nopad.packing.state.int_codec import ints_from_text, ints_to_text


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**63 - 1)))
@example([255, 256])
@example([65535, 65536])
@example([2**32 - 1, 2**32])
def test_integers_come_back(values):
    assert ints_from_text(ints_to_text(np.array(values, np.int64))).tolist() == values


@pytest.mark.parametrize("text", ["", "3:AQID", "1:not base64!", "AQID", "2:AQID"])
def test_other_text_is_refused(text):
    with pytest.raises(ValueError):
        ints_from_text(text)


def test_a_thousand_lengths_take_less_than_three_kilobytes():
    assert len(ints_to_text(np.arange(1024) * 60)) < 3000

"""Fingerprints of rows depend on every entry."""

import numpy as np
import pytest
import torch
from nopad.packing.state import Fingerprint


def ragged(entry):
    rows = np.empty(2, object)
    rows[0], rows[1] = np.arange(3000), np.arange(2)
    rows[0][1500] = entry
    return rows


def bfloat16(entry):
    tensor = torch.zeros(3000, dtype=torch.bfloat16)
    tensor[1500] = entry
    return tensor


@pytest.mark.parametrize("make", [ragged, bfloat16])
def test_one_entry_in_the_middle_of_a_long_row_tells_rows_apart(make):
    prints = [Fingerprint("rows").row({"a": make(entry)}).text() for entry in (7, 7, 8)]
    assert prints[0] == prints[1] != prints[2]

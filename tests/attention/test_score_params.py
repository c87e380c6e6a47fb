"""What an attention call may ask for."""

from __future__ import annotations

import pytest
import torch
from nopad.attention import Varlen, attend


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan")])
def test_a_factor_of_the_scores_that_is_not_positive_is_refused(scale):
    """Kernels take the maximum before they apply it."""
    q = torch.randn(3, 2, 16)
    varlen = Varlen(torch.tensor([0, 3], dtype=torch.int32), 3)
    with pytest.raises(ValueError, match=r"scale is .*positive"):
        attend(q, q, q, varlen, layer=0, scale=scale)

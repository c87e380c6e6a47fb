"""The estimate of a mixture's epoch is what drawing its documents gives."""

import numpy as np
import pytest
from nopad.packing.ordering import Mixture
from nopad.packing.ordering.mixture import MixedOrder, estimate_epoch

STRATEGIES = ["first_exhausted", "all_exhausted", "all_exhausted_without_replacement"]
COUNTS = [450, 150, 1000]
LENGTHS = np.random.default_rng(0).integers(1, 40, sum(COUNTS))
WEIGHTS = [
    [1, 1, 1],
    [5, 0.1, 2],
    [3, 1, 0],
    [[(0, 1.0), (10_000, 0.2)], 0.5, [(0, 0.1), (20_000, 1.0)]],
    [[(0, 1.0), (4_500, 0.0)], 0.5, 0.5],
]


@pytest.mark.parametrize("stopping_strategy", STRATEGIES)
@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_the_tokens_of_each_source_are_those_that_an_epoch_draws(weights, stopping_strategy):
    bounds = [0, *np.cumsum(COUNTS).tolist()]
    mixture = Mixture(weights, stopping_strategy)
    order = MixedOrder(bounds, LENGTHS.__getitem__, mixture, seed=0, shuffle=True)
    documents = np.concatenate(list(order.read(0)))
    sources = np.searchsorted(bounds, documents, side="right") - 1
    drawn = np.bincount(sources, LENGTHS[documents], len(COUNTS))
    tokens = np.add.reduceat(LENGTHS, bounds[:-1])
    estimate = estimate_epoch(tokens, weights, stopping_strategy)
    assert abs(estimate - drawn).max() < 0.02 * drawn.sum()

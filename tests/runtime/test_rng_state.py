"""Random states: unchanged around a block, and restored from a checkpoint."""

import random

import numpy as np
import pytest
import torch
from nopad.runtime import gather_rng_states, load_rng_states, preserve_rng, rng_states

CPU = torch.device("cpu")


def draw():
    return random.random(), float(np.random.rand()), float(torch.rand(()))


@pytest.mark.parametrize("fails", [False, True])
def test_a_block_leaves_all_three_random_states_as_they_were(fails):
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    try:
        with preserve_rng(CPU):
            draw()
            if fails:
                raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])


def test_saved_states_are_restored():
    states = gather_rng_states(CPU)
    assert len(states) == 1 and torch.equal(states[0][0], rng_states()[0])
    drawn = torch.rand(4).tolist()
    load_rng_states(states, CPU)
    assert torch.rand(4).tolist() == drawn


def test_states_of_another_world_size_are_not_restored():
    torch.manual_seed(5)
    state = torch.get_rng_state().tolist()
    other = torch.Generator().manual_seed(6).get_state()
    load_rng_states([[other], [other]], CPU)
    assert torch.get_rng_state().tolist() == state


@pytest.mark.gpu
def test_the_state_of_the_gpu_is_kept_and_saved():
    device = torch.device("cuda", torch.cuda.current_device())
    torch.rand(1, device=device)
    states = gather_rng_states(device)
    with preserve_rng():
        drawn = torch.rand(4, device=device)
    assert torch.equal(torch.rand(4, device=device), drawn)
    load_rng_states(states, device)
    assert torch.equal(torch.rand(4, device=device), drawn)

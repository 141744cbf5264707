"""A model that claims more positions than any pool has costs what its pool costs."""

from __future__ import annotations

import pytest
import torch

from giveway.runtime.tiny import tiny_checkpoint
from tests.backends import NAMES, load_backend
from tests.runtime.backend_driver import Driver, random_tokens


@pytest.mark.parametrize("name", NAMES)
def test_a_model_of_two_thousand_million_positions_loads_and_computes(name: str) -> None:
    # Goal: the angles of all its positions would take more than 100 GB.
    tokens = random_tokens(1, 100, 260)
    long, short = (
        Driver(load_backend(name, tiny_checkpoint(3, max_positions=count)), num_blocks=8).logits_in_chunks(tokens, 30)
        for count in (2**31 - 1, 4096)
    )
    assert torch.equal(long, short)


@pytest.mark.parametrize("name", NAMES)
def test_a_pool_that_is_allocated_anew_has_the_angles_of_its_own_positions(name: str) -> None:
    tokens = random_tokens(2, 100, 260)
    backend = load_backend(name, tiny_checkpoint(3))
    Driver(backend, num_blocks=2)
    grown = Driver(backend, num_blocks=8).logits_in_chunks(tokens, 30)
    assert torch.equal(grown, Driver(load_backend(name, tiny_checkpoint(3)), num_blocks=8).logits_in_chunks(tokens, 30))

"""The dry backend's own behaviour."""

from __future__ import annotations

import pytest

from giveway.core.errors import InvariantError
from giveway.core.ids import DeviceBlockId, RequestId
from giveway.runtime.backend import BatchSequence, SequenceResult
from giveway.runtime.dry.dry_backend import DryBackend, choose_token
from tests.sample_inputs import mask_of, sample_input

VOCAB = 20


def result_of(forbidden: tuple[int, ...] = (), allowed: bytes | None = None) -> SequenceResult:
    backend = DryBackend(VOCAB)
    backend.allocate(num_device_blocks=2, num_host_blocks=0, block_size=4)
    sample = sample_input(prompt_token_ids=(1, 2), output_index=0, forbidden=forbidden, allowed=allowed)
    sequence = BatchSequence(RequestId("r"), (1, 2), 0, (DeviceBlockId(1),), sample=sample)
    return backend.forward([sequence])[0]


def test_a_request_whose_every_token_is_forbidden_gets_a_fault_and_not_an_endless_loop() -> None:
    fault = f"all {VOCAB} tokens are forbidden at output position 0"
    assert result_of(tuple(range(VOCAB))) == SequenceResult(fault=fault)
    assert result_of(tuple(range(-3, VOCAB + 3))).fault == fault
    with pytest.raises(InvariantError, match="all 20 are forbidden"):
        choose_token(7, VOCAB, sample_input(forbidden=tuple(range(VOCAB))))


@pytest.mark.parametrize("allowed", [0, 11, VOCAB - 1])
def test_the_one_token_that_is_allowed_is_chosen(allowed: int) -> None:
    # Ids outside the vocabulary, and one named twice, forbid nothing more.
    forbidden = (*(token for token in range(VOCAB) if token != allowed), VOCAB, VOCAB + 1, -1, (allowed + 1) % VOCAB)
    assert result_of(forbidden).token_id == allowed


def test_a_mask_restricts_the_choice_and_one_that_allows_nothing_is_a_fault() -> None:
    assert result_of(allowed=mask_of([13, VOCAB + 5])).token_id == 13
    assert result_of(allowed=mask_of([13, 14]), forbidden=(13,)).token_id == 14
    fault = f"all {VOCAB} tokens are forbidden at output position 0"
    assert result_of(allowed=mask_of([VOCAB])).fault == fault
    assert result_of(allowed=mask_of([13]), forbidden=(13,)).fault == fault

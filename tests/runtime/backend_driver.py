"""Drives a backend the way an engine would: block tables at random places, chunks, batches."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from giveway.core.ids import BlockTable, DeviceBlockId, RequestId
from giveway.core.sampling import SamplingParams
from giveway.runtime.backend import BatchSequence, SequenceResult
from tests.sample_inputs import GREEDY, sample_input


def random_tokens(seed: int, count: int, vocab_size: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(vocab_size) for _ in range(count)]


@dataclass
class Driver:
    """One allocated backend and its free blocks, handed out in random order."""

    backend: Any  # a Backend that has `logits` too, for comparisons
    block_size: int = 16
    num_blocks: int = 512
    num_host_blocks: int = 64
    seed: int = 0
    free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.backend.allocate(
            num_device_blocks=self.num_blocks, num_host_blocks=self.num_host_blocks, block_size=self.block_size
        )
        self.free = list(range(self.num_blocks))
        random.Random(self.seed).shuffle(self.free)

    def table(self, num_tokens: int) -> BlockTable:
        """Take blocks for so many tokens."""
        count = -(-num_tokens // self.block_size)
        taken, self.free = self.free[:count], self.free[count:]
        assert len(taken) == count
        return tuple(DeviceBlockId(block) for block in taken)

    def give_back(self, table: BlockTable) -> None:
        self.free += table

    def chunk(self, tokens: Sequence[int], start: int, table: BlockTable, **fields: Any) -> BatchSequence:
        return BatchSequence(
            request_id=RequestId(f"r{table[0]}"), token_ids=tokens, start=start, block_table=table, **fields
        )

    def logits_in_chunks(
        self, tokens: Sequence[int], chunk_size: int, mates: Sequence[BatchSequence] = ()
    ) -> torch.Tensor:
        """Logits after every token, computed `chunk_size` tokens at a time, with `mates` in every batch."""
        table = self.table(len(tokens))
        rows = []
        for start in range(0, len(tokens), chunk_size):
            piece = tokens[start : start + chunk_size]
            place = len(mates) // 2  # in the middle of its mates
            batch = [*mates[:place], self.chunk(piece, start, table), *mates[place:]]
            before = sum(len(mate.token_ids) for mate in mates[:place])
            rows.append(torch.as_tensor(self.backend.logits(batch))[before : before + len(piece)].clone())
        self.give_back(table)
        return torch.cat(rows)

    def generate(
        self, prompt: Sequence[int], num_tokens: int, params: SamplingParams = GREEDY, seed: int = 0
    ) -> list[int]:
        """Answer of one request alone in the batch."""
        table = self.table(len(prompt) + num_tokens)
        output: list[int] = []
        known, start = list(prompt), 0
        for _ in range(num_tokens):
            sample = sample_input(
                params, seed=seed, output_index=len(output), prompt_token_ids=prompt, output_token_ids=tuple(output)
            )
            result = self.run([self.chunk(known[start:], start, table, sample=sample)])[0]
            assert result.token_id is not None, result.fault
            start = len(known)
            output.append(result.token_id)
            known.append(result.token_id)
        self.give_back(table)
        return output

    def run(self, batch: Sequence[BatchSequence]) -> list[SequenceResult]:
        results: list[SequenceResult] = self.backend.forward(batch)
        return results

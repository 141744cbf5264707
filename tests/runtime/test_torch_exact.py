"""An answer depends on its own tokens only, bit for bit: not on chunking, batch mates, block places or a swap."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from giveway.core.ids import HostBlockId
from giveway.core.sampling import SamplingParams
from giveway.runtime.backend import BatchSequence
from giveway.runtime.tiny import tiny_checkpoint
from giveway.runtime.torch import load_backend, weights
from giveway.runtime.torch.attention import PIECE_TOKENS, Bucket, attend_in_pieces, num_pieces
from giveway.runtime.torch.exact_ops import (
    REFERENCE_ROWS,
    ROW_COUNTS,
    Product,
    RowCounts,
    admitted_row_counts,
    fold_halves,
    noise_operands,
    silu_times,
)
from giveway.runtime.torch.weights import choose_product
from tests.runtime.backend_driver import Driver, random_tokens
from tests.sample_inputs import sample_input

CPU = torch.device("cpu")
DTYPES = ("float32", "bfloat16")
GEOMETRIES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "as many KV heads": {"num_kv_heads": 4},
    "three a KV head, odd sizes": {
        "num_heads": 9,
        "num_kv_heads": 3,
        "hidden_size": 100,
        "intermediate_size": 84,
        "vocab_size": 333,
    },
    "head norms, biases, window": {"qk_norm": True, "qkv_bias": True, "sliding_window": 40, "head_size": 32},
}


@pytest.fixture(params=[(dtype, geometry) for dtype in DTYPES for geometry in GEOMETRIES], scope="module")
def driver(request: pytest.FixtureRequest) -> Driver:
    dtype, geometry = request.param
    return Driver(load_backend(tiny_checkpoint(7, **GEOMETRIES[geometry]), dtype=dtype))


def mates_of(driver: Driver, count: int, seed: int) -> list[BatchSequence]:
    """Other requests: decodes and chunks of mixed lengths, which read whatever their blocks hold."""
    rng = random.Random(seed)
    mates = []
    for index in range(count):
        num_tokens, start = rng.choice([1, 1, 1, 3, 17, 40]), rng.choice([0, 5, 100, 140])
        tokens = random_tokens(seed + index, num_tokens, driver.backend.vocab_size)
        mates.append(driver.chunk(tokens, start, driver.table(start + num_tokens)))
    return mates


@pytest.fixture
def _restore_free(driver: Driver) -> Iterator[None]:
    free = list(driver.free)
    yield
    driver.free = free


@pytest.fixture(scope="module")
def token_by_token(driver: Driver) -> torch.Tensor:
    """The logits of a prompt, computed in the slowest way: of its beginnings, too, since no token sees a later one."""
    return driver.logits_in_chunks(random_tokens(200, 200, driver.backend.vocab_size), 1)


@pytest.mark.usefixtures("_restore_free")
@pytest.mark.parametrize("length", [1, 50, 63, 64, 65, 200])
def test_chunking_changes_no_bit(driver: Driver, token_by_token: torch.Tensor, length: int) -> None:
    # Goal: a prompt in one piece, in slices and token by token gives the same logits at every position.
    tokens = random_tokens(200, 200, driver.backend.vocab_size)[:length]
    for chunk_size in (7, 16, 64, length):
        logits = driver.logits_in_chunks(tokens, chunk_size)
        assert torch.equal(logits, token_by_token[:length]), f"chunks of {chunk_size}"


@pytest.mark.usefixtures("_restore_free")
@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 15, 16, 33, 63])
def test_batch_mates_change_no_bit(driver: Driver, count: int) -> None:
    # Goal: decodes and chunks of others, more and fewer, shorter and longer, leave a request's logits as they are.
    tokens = random_tokens(3, 70, driver.backend.vocab_size)
    alone = driver.logits_in_chunks(tokens, 16)
    assert torch.equal(driver.logits_in_chunks(tokens, 16, mates_of(driver, count, seed=count)), alone)


@pytest.mark.usefixtures("_restore_free")
def test_places_of_blocks_change_no_bit(driver: Driver) -> None:
    tokens = random_tokens(4, 150, driver.backend.vocab_size)
    first = driver.logits_in_chunks(tokens, 64)
    for seed in range(3):
        random.Random(seed).shuffle(driver.free)
        assert torch.equal(driver.logits_in_chunks(tokens, 64), first)


@pytest.mark.usefixtures("_restore_free")
def test_a_swap_out_and_in_changes_no_bit(driver: Driver) -> None:
    # Goal: KV that went to the host and came back into other blocks is the same KV.
    tokens = random_tokens(5, 90, driver.backend.vocab_size)
    whole = driver.logits_in_chunks(tokens, 90)
    old = driver.table(90)
    driver.backend.logits([driver.chunk(tokens[:80], 0, old)])
    parked = [HostBlockId(block) for block in range(len(old))]
    driver.backend.copy_out(list(zip(old, parked, strict=True)))
    driver.backend.logits([driver.chunk([0] * len(old) * driver.block_size, 0, old)])  # somebody else uses the blocks
    new = driver.table(90)
    driver.backend.copy_in(list(zip(parked, new, strict=True)))
    assert torch.equal(driver.backend.logits([driver.chunk(tokens[80:], 80, new)]), whole[80:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_embedded_models_geometry_is_exact(dtype: str) -> None:
    # Goal: the shapes that are served every day (one layer of them; the head with a smaller vocabulary).
    checkpoint = tiny_checkpoint(
        1,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=1,
        num_heads=9,
        num_kv_heads=3,
        head_size=64,
        vocab_size=4096,
    )
    driver = Driver(load_backend(checkpoint, dtype=dtype))
    tokens = random_tokens(1, 512, 4096)
    whole = driver.logits_in_chunks(tokens, 512)
    for chunk_size in (50, 100, 256):
        assert torch.equal(driver.logits_in_chunks(tokens, chunk_size), whole), f"chunks of {chunk_size}"
    alone = driver.logits_in_chunks(tokens[:100], 1)
    assert torch.equal(alone, whole[:100])
    assert torch.equal(driver.logits_in_chunks(tokens[:100], 20, mates_of(driver, 15, seed=2)), alone)


@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_beyond_the_largest_product_are_exact(dtype: str) -> None:
    # Goal: more rows than the largest admitted count, and a context of many pieces.
    driver = Driver(load_backend(tiny_checkpoint(2), dtype=dtype))
    tokens = random_tokens(2, 1300, 260)
    whole = driver.logits_in_chunks(tokens, 1300)
    for chunk_size in (333, 512):
        assert torch.equal(driver.logits_in_chunks(tokens, chunk_size), whole)
    table = driver.table(1300)
    driver.backend.logits([driver.chunk(tokens[:1299], 0, table)])
    assert torch.equal(driver.backend.logits([driver.chunk(tokens[1299:], 1299, table)]), whole[1299:])


def test_products_that_are_not_repacked_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    # Goal: the library behind plain `linear` does change its sums below four rows; the probe keeps away from there.
    def plain(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
        return lambda rows: torch.nn.functional.linear(rows, weight, bias)

    monkeypatch.setattr(weights, "choose_product", lambda device, dtype: plain)
    driver = Driver(load_backend(tiny_checkpoint(7)))
    tokens = random_tokens(5, 100, 260)
    whole = driver.logits_in_chunks(tokens, 100)
    for chunk_size in (1, 3, 7, 32):
        assert torch.equal(driver.logits_in_chunks(tokens, chunk_size, mates_of(driver, 2, seed=1)), whole)


def test_sampled_tokens_do_not_depend_on_the_batch() -> None:
    # Goal: draws and log-probabilities of sixteen requests together are those of each alone.
    driver = Driver(load_backend(tiny_checkpoint(3)))
    params = SamplingParams(temperature=1.3, top_p=0.9, top_k=50, logprobs=3, repetition_penalty=1.2)
    batch = []
    for index in range(16):
        tokens = random_tokens(index, 5 + 9 * index, 260)
        sample = sample_input(params, seed=index, output_index=index, prompt_token_ids=tokens)
        batch.append(driver.chunk(tokens, 0, driver.table(len(tokens)), sample=sample))
    together = driver.run(batch)
    assert [driver.run([sequence])[0] for sequence in batch] == together


def test_the_number_of_threads_changes_no_bit() -> None:
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2):
            driver = Driver(load_backend(tiny_checkpoint(4, hidden_size=256, intermediate_size=512), num_threads=count))
            results.append(driver.logits_in_chunks(random_tokens(4, 300, 260), 300))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*results)


# The parts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(960, 576), (576, 1536), (36, 100), (260, 64)])
def test_admitted_row_counts_give_every_row_the_same_bits(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    # Goal: what the probe admits holds for other data than the probe's own.
    make = choose_product(CPU, dtype)
    product = make(torch.zeros(shape, dtype=dtype), None)
    counts = admitted_row_counts(lambda weight: make(weight, None), shape, product=product, device=CPU, dtype=dtype)
    rows, weight = noise_operands(512, *shape, torch.Generator().manual_seed(99))
    product, rows = make(weight.to(dtype), None), rows.to(dtype)
    expected = torch.cat([product(tile) for tile in torch.split(rows, REFERENCE_ROWS)])
    assert REFERENCE_ROWS in counts.admitted
    for count in counts.admitted:
        for first in range(0, 512 - count + 1, 100):
            assert torch.equal(product(rows[first : first + count]), expected[first : first + count])


def test_the_probe_refuses_a_product_whose_sums_depend_on_the_row_count() -> None:
    # Goal: a library that splits the sum in two from 64 rows up must not be admitted there.
    def make(weight: torch.Tensor) -> Product:
        def product(rows: torch.Tensor) -> torch.Tensor:
            half = weight.shape[1] // 2 if len(rows) >= 64 else weight.shape[1]
            first = torch.zeros(len(rows), len(weight))
            for column in range(half):
                first += rows[:, column, None] * weight[:, column]
            second = torch.zeros_like(first)
            for column in range(half, weight.shape[1]):
                second += rows[:, column, None] * weight[:, column]
            return first + second

        return product

    product = make(torch.zeros(8, 24))
    counts = admitted_row_counts(make, (8, 24), product=product, device=CPU, dtype=torch.float32)
    assert counts.admitted == tuple(count for count in ROW_COUNTS if count < 64)


def test_rows_are_padded_to_admitted_counts_only() -> None:
    counts = RowCounts((4, 16, 64))
    assert [counts.padded(rows) for rows in (1, 4, 5, 17, 64, 65, 130)] == [4, 4, 16, 64, 64, 68, 132]
    assert [counts.pieces(rows) for rows in (4, 64, 132)] == [[4], [64], [64, 64, 4]]


def test_zeros_at_the_end_leave_a_folded_sum_as_it_was() -> None:
    parts = torch.randn(3, 16, 5, generator=torch.Generator().manual_seed(0)) * 1e3
    for count in range(1, 17):
        used = parts[:, :count].clone()
        folded = fold_halves(used.clone())
        for longer in range(count, 17):
            padded = torch.cat([used, torch.zeros(3, longer - count, 5)], 1)
            assert torch.equal(fold_halves(padded), folded), (count, longer)


def test_silu_rounds_alike_at_every_position() -> None:
    # Goal: the composed SiLU, unlike the library's, does not care where in a tensor an element stands.
    generator = torch.Generator().manual_seed(1)
    gate, up = torch.randn(7, 10_007, generator=generator) * 4, torch.randn(7, 10_007, generator=generator)
    whole = silu_times(gate, up)
    for first, last in ((0, 1), (3, 20), (9_990, 10_007), (5_000, 5_033)):
        piece = silu_times(gate[:, first:last].contiguous(), up[:, first:last].contiguous())
        assert torch.equal(piece, whole[:, first:last])
    torch.testing.assert_close(whole, torch.nn.functional.silu(gate) * up, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("width", [64, 100, 576, 896, 4096])
def test_norm_and_softmax_of_a_row_do_not_depend_on_the_others(width: int) -> None:
    # Goal: the two library reductions that the exact path relies on.
    rows = torch.randn(65, width, generator=torch.Generator().manual_seed(width)) * 3
    weight = torch.rand(width) + 0.5
    normed = torch.nn.functional.rms_norm(rows, (width,), weight, 1e-5)
    softmax = torch.softmax(torch.nn.functional.pad(rows, (0, 4224 - width), value=-torch.inf), -1)
    for count in (1, 2, 16, 33):
        piece = rows[11 : 11 + count].clone()
        assert torch.equal(torch.nn.functional.rms_norm(piece, (width,), weight, 1e-5), normed[11 : 11 + count])
        padded = -(-width // 128) * 128
        short = torch.softmax(torch.nn.functional.pad(piece, (0, padded - width), value=-torch.inf), -1)
        assert torch.equal(short[:, :width], softmax[11 : 11 + count, :width])


def test_pieces_are_rounded_up_to_few_sizes() -> None:
    tokens = (1, 128, 129, 300, 513, 800, 1024, 1500)
    assert [num_pieces(count, is_rounded=True) for count in tokens] == [1, 1, 2, 3, 6, 8, 8, 12]
    assert [num_pieces(count, is_rounded=False) for count in tokens] == [1, 1, 2, 3, 5, 7, 8, 12]


def test_a_bfloat16_query_is_not_rounded_once_more_by_the_scale() -> None:
    # Goal: the reference differs from float64 by float32 rounding only, also where the scale is no power of two.
    generator = torch.Generator().manual_seed(8)
    queries, keys, values = (
        (torch.randn(1, rows, 80, generator=generator) * 4).bfloat16() for rows in (4, PIECE_TOKENS, PIECE_TOKENS)
    )
    nothing = torch.zeros(0, dtype=torch.long)
    bucket = Bucket(1, 4, 1, nothing, nothing, torch.zeros(1, 1, 4, 1, PIECE_TOKENS))
    expected = (queries.double() @ keys.double().mT * 80**-0.5).softmax(-1) @ values.double()
    attended = attend_in_pieces(queries, keys, values, bucket, 80**-0.5)
    torch.testing.assert_close(attended.double(), expected, rtol=1e-4, atol=1e-4)

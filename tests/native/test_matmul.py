"""The matrix product: right, and the same to the bit whatever surrounds a row and whichever instructions run."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

kernels = pytest.importorskip("giveway_kernels._native")
gguf = pytest.importorskip("gguf")

Floats = npt.NDArray[np.float32]

SETS = [name for name, why_not in kernels.instruction_sets() if not why_not]
ENCODINGS = ["F32", "BF16", "Q8_0", "Q4_0", "Q4_1"]
COMPUTE = ["f32", "bf16"]
BLOCK_K = 32  # inputs that are added before they join the total


def bf16(values: Floats) -> Floats:
    """Rounded to the nearest bfloat16, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


class Weights:
    """A matrix as a file stores it, as numbers, and packed."""

    def __init__(self, encoding: str, values: Floats, compute: str = "f32") -> None:
        kind = gguf.GGMLQuantizationType[encoding]
        stored = gguf.quants.quantize(np.ascontiguousarray(values), kind)
        self.values: Floats = gguf.quants.dequantize(stored, kind).astype(np.float32)
        self.num_inputs = values.shape[1]
        self._part = encoding, np.ascontiguousarray(stored).view(np.uint8).reshape(len(values), -1)
        self._compute = compute
        self._packed: dict[str, Any] = {}

    def packed(self, isa: str = "") -> Any:
        """The matrix as an instruction set wants it."""
        if isa not in self._packed:
            self._packed[isa] = kernels.Matrix.pack(
                [self._part], num_inputs=self.num_inputs, compute=self._compute, isa=isa
            )
        return self._packed[isa]


def normal(*shape: int, seed: int, scale: float = 1) -> Floats:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def same_bits(a: Floats, b: Floats) -> bool:
    """Equal to the bit; any NaN is as good as another."""
    return bool(((a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))).all())


def adds_in_block_order(isa: str, compute: str) -> bool:
    return not (isa == "avx512_bf16" and compute == "bf16")


def product_in_block_order(x: Floats, weights: Floats) -> Floats:
    """The order that the package's README defines, in numpy.

    A float64 sum of a product and a float32 rounds once, as a fused multiply-add does, if the numbers are short enough.
    """
    total = np.zeros((len(x), len(weights)), np.float32)
    for first in range(0, x.shape[1], BLOCK_K):
        chains = []
        for parity in (0, 1):
            chain = np.zeros_like(total)
            for k in range(first + parity, min(first + BLOCK_K, x.shape[1]), 2):
                exact = x[:, k, None].astype(np.float64) * weights[None, :, k].astype(np.float64) + chain
                chain = exact.astype(np.float32)
            chains.append(chain)
        total = total + (chains[0] + chains[1])
    return total


def product_in_dot_order(x: Floats, weights: Floats) -> Floats:
    """What AVX512-BF16 does: one chain through all pairs, of each the odd input first."""
    total = np.zeros((len(x), len(weights)), np.float32)
    for pair in range(0, x.shape[1], 2):
        for k in (pair + 1, pair):
            if k < x.shape[1]:
                exact = x[:, k, None].astype(np.float64) * weights[None, :, k].astype(np.float64) + total
                total = exact.astype(np.float32)
    return total


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_products_are_those_of_float64_but_for_rounding(encoding: str, compute: str, isa: str) -> None:
    weights = Weights(encoding, normal(49, 320, seed=1, scale=1 / 8), compute)
    for num_rows in (1, 2, 5, 16, 33):
        x = normal(num_rows, 320, seed=num_rows)
        got = kernels.multiply(x, weights.packed(isa), compute=compute, isa=isa)
        left, right = (bf16(x), bf16(weights.values)) if compute == "bf16" else (x, weights.values)
        wanted = left.astype(np.float64) @ right.T.astype(np.float64)
        # Each rounding that a product goes through errs by half a unit of the sum so far.
        num_roundings = 16 + 2 + 10 if adds_in_block_order(isa, compute) else 320
        bound = num_roundings * 2.0**-24 * (np.abs(left).astype(np.float64) @ np.abs(right.T).astype(np.float64))
        assert (np.abs(got - wanted) <= bound).all()


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("compute", COMPUTE)
def test_products_of_short_numbers_are_added_in_the_documented_order(compute: str, isa: str) -> None:
    # Goal: the order itself is pinned, with numbers whose products and sums are exact in float64.
    x, values = bf16(normal(7, 200, seed=2)), bf16(normal(33, 200, seed=3))
    weights = Weights("F32", values, compute)
    got = kernels.multiply(x, weights.packed(isa), compute=compute, isa=isa)
    in_blocks, in_dots = product_in_block_order(x, values), product_in_dot_order(x, values)
    assert not same_bits(in_blocks, in_dots)  # else this would show nothing
    assert same_bits(got, in_blocks if adds_in_block_order(isa, compute) else in_dots)


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_row_is_the_same_to_the_bit_whatever_the_number_of_rows(encoding: str, compute: str, isa: str) -> None:
    num_rows = 1024 if isa != "scalar" else 260
    weights = Weights(encoding, normal(33, 96, seed=4), compute)
    x = normal(num_rows, 96, seed=5)
    whole = kernels.multiply(x, weights.packed(isa), compute=compute, isa=isa)
    for count in [*range(1, 26), 31, 32, 33, 47, 48, 49, 63, 64, 65, 96, 97, 120, 121, 127, 250, num_rows - 1]:
        first = (count * 37) % (num_rows - count + 1)
        part = kernels.multiply(x[first : first + count].copy(), weights.packed(isa), compute=compute, isa=isa)
        assert same_bits(part, whole[first : first + count]), count


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("compute", COMPUTE)
def test_long_rows_are_the_same_to_the_bit_whatever_the_number_of_rows(compute: str, isa: str) -> None:
    # Goal: more inputs than are decoded at a time, a chunk of rows that ends early because they are long, and enough
    # blocks for all that is done between them.
    num_inputs, num_rows = 3200, 300 if isa == "amx" and compute == "bf16" else 40
    weights = Weights("Q4_1", normal(80, num_inputs, seed=6), compute)
    x = normal(num_rows, num_inputs, seed=7)
    whole = kernels.multiply(x, weights.packed(isa), compute=compute, isa=isa)
    for count in (count for count in (1, 2, 3, 7, 17, 25, 49, 65, 129) if count < num_rows):
        assert same_bits(
            kernels.multiply(x[:count].copy(), weights.packed(isa), compute=compute, isa=isa), whole[:count]
        )


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_instruction_set_gives_the_bits_of_the_scalar_one(encoding: str, compute: str, isa: str) -> None:
    if not adds_in_block_order(isa, compute):
        pytest.skip("adds in an order of its own")
    weights = Weights(encoding, normal(50, 352, seed=8), compute)
    for num_rows in (1, 4, 16, 17, 40, 70):
        x = normal(num_rows, 352, seed=9)
        wanted = kernels.multiply(x, weights.packed("scalar"), compute=compute, isa="scalar")
        assert same_bits(kernels.multiply(x, weights.packed(isa), compute=compute, isa=isa), wanted)


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize("encoding", ["Q8_0", "Q4_0", "Q4_1"])
def test_encoded_weights_give_the_bits_of_unpacked_ones(encoding: str, compute: str, isa: str) -> None:
    weights = Weights(encoding, normal(32, 288, seed=10), compute)
    unpacked = Weights("F32", weights.values, compute)
    for num_rows in (1, 3, 20):
        x = normal(num_rows, 288, seed=11)
        wanted = kernels.multiply(x, unpacked.packed(isa), compute=compute, isa=isa)
        assert same_bits(kernels.multiply(x, weights.packed(isa), compute=compute, isa=isa), wanted)


def test_matrices_that_lie_in_the_same_pages_come_and_go_one_by_one() -> None:
    # Goal: small matrices share huge pages; one that goes takes nothing with it, and a new one overwrites nobody.
    x = normal(2, 96, seed=20)
    rng = np.random.default_rng(21)
    alive: dict[int, tuple[Weights, Floats]] = {}
    for number in range(300):  # 60 MiB in all, of which a third is alive at a time
        weights = Weights("F32", normal(int(rng.integers(1, 1024)), 96, seed=number))
        alive[number] = weights, kernels.multiply(x, weights.packed())
        if len(alive) > 100:
            del alive[int(rng.choice(list(alive)))]
    for weights, wanted in alive.values():
        assert same_bits(kernels.multiply(x, weights.packed()), wanted)


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("compute", COMPUTE)
def test_threads_share_out_panels_and_change_nothing(compute: str, isa: str) -> None:
    weights = Weights("Q4_1", normal(16 * 7, 64, seed=12), compute)
    x = normal(19, 64, seed=13)
    alone = kernels.multiply(x, weights.packed(isa), compute=compute, isa=isa)
    for num_threads in (2, 3, 5, 9):
        assert same_bits(
            kernels.multiply(x, weights.packed(isa), compute=compute, isa=isa, num_threads=num_threads), alone
        )


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize("num_inputs", [2, 30, 33, 576])
def test_sizes_that_fill_no_block_or_panel(num_inputs: int, compute: str, isa: str) -> None:
    for num_outputs in (1, 15, 17, 96):
        weights = Weights("F32", normal(num_outputs, num_inputs, seed=14), compute)
        for num_rows in (1, 6, 18):
            x = normal(num_rows, num_inputs, seed=15)
            got = kernels.multiply(x, weights.packed(isa), compute=compute, isa=isa)
            left, right = (bf16(x), bf16(weights.values)) if compute == "bf16" else (x, weights.values)
            assert got.shape == (num_rows, num_outputs)
            np.testing.assert_allclose(got, left.astype(np.float64) @ right.T.astype(np.float64), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_an_output_has_the_same_bits_whatever_outputs_lie_beside_it(encoding: str, compute: str, isa: str) -> None:
    # Goal: every number of panels that a piece of work may hold, for every way in which rows are tiled.
    values = normal(176, 96, seed=27)
    for num_rows in (1, 3, 4, 5, 12, 13, 25, 49):
        x = normal(num_rows, 96, seed=28)
        whole = kernels.multiply(x, Weights(encoding, values, compute).packed(isa), compute=compute, isa=isa)
        for num_panels in range(1, 11):
            part = Weights(encoding, values[: 16 * num_panels], compute)
            got = kernels.multiply(x, part.packed(isa), compute=compute, isa=isa)
            assert same_bits(got, np.ascontiguousarray(whole[:, : 16 * num_panels]))


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize("spoiler", [np.nan, np.inf, 3e38])
def test_what_breaks_one_row_does_not_reach_its_neighbours(spoiler: float, compute: str, isa: str) -> None:
    weights = Weights("Q8_0", normal(32, 64, seed=16), compute)
    for num_rows in (2, 3, 6, 14, 33):
        x = normal(num_rows, 64, seed=17)
        wanted = kernels.multiply(x, weights.packed(isa), compute=compute, isa=isa)
        spoilt = x.copy()
        spoilt[num_rows // 2] = spoiler
        got = kernels.multiply(spoilt, weights.packed(isa), compute=compute, isa=isa)
        others = np.arange(num_rows) != num_rows // 2
        assert same_bits(got[others], wanted[others])
        assert not np.isfinite(got[num_rows // 2]).all()


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("compute", COMPUTE)
def test_denormal_numbers_count_as_zero(compute: str, isa: str) -> None:
    # Goal: what AMX does always, all sets do: going in, and coming out.
    tiny = np.float32(2.0**-130)
    ones = Weights("F32", np.ones((16, 32), np.float32), compute)
    small = Weights("F32", np.full((16, 32), 2.0**-100, np.float32), compute)
    denormal = Weights("F32", np.full((16, 32), tiny), compute)
    for num_rows in (1, 5, 18):
        assert not kernels.multiply(np.full((num_rows, 32), tiny), ones.packed(isa), compute=compute, isa=isa).any()
        into_nothing = np.full((num_rows, 32), 2.0**-40, np.float32)
        assert not kernels.multiply(into_nothing, small.packed(isa), compute=compute, isa=isa).any()
        assert not kernels.multiply(
            np.full((num_rows, 32), 2.0**60, np.float32), denormal.packed(isa), compute=compute, isa=isa
        ).any()


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("compute", COMPUTE)
def test_numbers_near_the_ends_of_the_range_give_the_bits_of_the_scalar_set(compute: str, isa: str) -> None:
    if not adds_in_block_order(isa, compute):
        pytest.skip("adds in an order of its own")
    rng = np.random.default_rng(18)

    def wild(*shape: int) -> Floats:
        powers = rng.integers(-80, 60, shape)
        return np.ldexp(rng.standard_normal(shape), powers).astype(np.float32)

    weights = Weights("F32", wild(33, 96), compute)
    x = wild(21, 96)
    wanted = kernels.multiply(x, weights.packed("scalar"), compute=compute, isa="scalar")
    assert same_bits(kernels.multiply(x, weights.packed(isa), compute=compute, isa=isa), wanted)


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize("num_rows", [1, 3, 17, 40, 100])
def test_bias_and_what_is_there_already_are_added_to_the_finished_product(
    num_rows: int, compute: str, isa: str
) -> None:
    weights = Weights("Q4_0", normal(40, 320, seed=19), compute)
    x, bias, onto = normal(num_rows, 320, seed=20), normal(40, seed=21), normal(num_rows, 40, seed=22)
    product = kernels.multiply(x, weights.packed(isa), compute=compute, isa=isa)
    run: Callable[..., Any] = kernels.multiply
    assert same_bits(run(x, weights.packed(isa), compute=compute, isa=isa, bias=bias), product + bias)
    assert same_bits(run(x, weights.packed(isa), compute=compute, isa=isa, epilogue="add", onto=onto), onto + product)
    both = run(x, weights.packed(isa), compute=compute, isa=isa, epilogue="add", onto=onto, bias=bias)
    assert same_bits(both, onto + (product + bias))


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize("gate", ["silu", "gelu"])
def test_a_gated_product_is_the_activation_of_one_panel_times_the_next(gate: str, compute: str, isa: str) -> None:
    weights = Weights("Q4_1", normal(64, 288, seed=23, scale=1 / 8), compute)
    for num_rows in (1, 5, 18, 67):
        x = normal(num_rows, 288, seed=24)
        product = kernels.multiply(x, weights.packed(isa), compute=compute, isa=isa).reshape(num_rows, 2, 2, 16)
        gates = product[:, :, 0].reshape(num_rows, 32).astype(np.float64)
        ups = product[:, :, 1].reshape(num_rows, 32).astype(np.float64)
        if gate == "silu":
            wanted = gates / (1 + np.exp(-gates)) * ups
        else:
            wanted = gates * (1 + np.tanh(np.sqrt(2 / np.pi) * (gates + 0.044715 * gates**3))) / 2 * ups
        got = kernels.multiply(x, weights.packed(isa), compute=compute, isa=isa, epilogue="gate", gate=gate)
        np.testing.assert_allclose(got, wanted, rtol=2.0**-8 if compute == "bf16" else 2e-6, atol=1e-6)
        if compute == "bf16":
            assert same_bits(got, bf16(got))
        if adds_in_block_order(isa, compute):
            assert same_bits(
                got,
                kernels.multiply(
                    x, weights.packed("scalar"), compute=compute, isa="scalar", epilogue="gate", gate=gate
                ),
            )


@pytest.mark.skipif("amx" not in SETS, reason="no other set has an order of its own")
def test_a_matrix_in_the_order_of_another_instruction_set_is_refused() -> None:
    weights, x = Weights("Q8_0", normal(16, 64, seed=25), "bf16"), normal(2, 64, seed=26)
    for packed, isa in (("scalar", "amx"), ("amx", "scalar")):
        with pytest.raises(ValueError, match=f"packed for another instruction set or type than {isa}"):
            kernels.multiply(x, weights.packed(packed), compute="bf16", isa=isa)

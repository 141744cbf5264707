"""Operations whose result for one row does not depend on the other rows, bit for bit.

PyTorch does not promise that. On CPU a matrix product may sum in another order when it gets more rows, `silu` rounds
differently in the last few elements of a thread's share, and a batched product changes kernels with its size. So:

* a product runs only with row counts that were *shown*, on this machine and for this weight shape, to give every row
  the same bits as the reference tile of 16 rows does. The demonstration (`admitted_row_counts`) costs some milliseconds
  at start; a batch is padded up to the next admitted count. Running everything in tiles of 16 would be right as well,
  but would take half as long again for 512 rows.
* SiLU is composed of operations that round alike at every position (IEEE division, and `exp`, whose vector and tail
  code agree; those of `sigmoid` do not).
* sums over a growing context are folded in halves, so that zeros appended at the end change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]  # [rows, in] -> [rows, out]

REFERENCE_ROWS = 16
ROW_COUNTS = (4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)

# A weight larger than this is probed as it is; a second one made of noise would cost too much memory.
_LARGEST_NOISE_ELEMENTS = 1 << 22


@dataclass(frozen=True, slots=True)
class RowCounts:
    """The row counts with which a set of products may run, ascending; all of them give a row the same bits."""

    admitted: tuple[int, ...]

    def padded(self, num_rows: int) -> int:
        """Return the rows to compute so that `num_rows` are covered by admitted counts."""
        largest = self.admitted[-1]
        whole, rest = divmod(num_rows, largest)
        return whole * largest + (next(count for count in self.admitted if count >= rest) if rest else 0)

    def pieces(self, padded_rows: int) -> list[int]:
        """Split a padded number of rows into admitted counts."""
        largest = self.admitted[-1]
        whole, rest = divmod(padded_rows, largest)
        return [largest] * whole + ([rest] if rest else [])


def run_in_pieces(product: Product, rows: Tensor, counts: RowCounts | None) -> Tensor:
    """Apply `product` to rows [padded rows, in] in admitted row counts; None: in one call, whatever the count."""
    if counts is None or rows.shape[0] <= counts.admitted[-1]:
        return product(rows)
    return torch.cat([product(piece) for piece in torch.split(rows, counts.pieces(rows.shape[0]))])


def noise_operands(
    num_rows: int, out_features: int, in_features: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Rows [num_rows, in] and a weight [out, in] whose exact products are zero, as float32.

    Every term has a partner of opposite sign at a random distance, and magnitudes spread over 2**12: what is left is
    rounding error alone, so any change in the order of summation shows, also after rounding to bfloat16.
    """
    half = in_features // 2
    order = torch.randperm(2 * half, generator=generator)

    def spread(count: int) -> Tensor:
        exponents = torch.randint(-6, 7, (count, half), generator=generator)
        # Eight bits of mantissa, so that bfloat16 holds the values exactly and the partners stay exact opposites.
        return torch.randn(count, half, generator=generator).to(torch.bfloat16).float() * 2.0**exponents

    rows, weight = spread(num_rows), spread(out_features)
    rows = torch.cat([rows, -rows], 1)[:, order]
    weight = torch.cat([weight, weight], 1)[:, order]
    missing = in_features - 2 * half
    return torch.nn.functional.pad(rows, (0, missing)), torch.nn.functional.pad(weight, (0, missing))


def admitted_row_counts(
    make_product: Callable[[Tensor], Product],
    shape: tuple[int, int],
    *,
    product: Product,
    device: torch.device,
    dtype: torch.dtype,
    largest: int = ROW_COUNTS[-1],
) -> RowCounts:
    """Find the row counts up to `largest` that give every row, wherever it stands, the bits of the 16-row tile.

    make_product: builds a product from a weight as the model does. shape: [out, in] of the weight. product: the real
    one, used when a noise weight of that shape would be too large.
    """
    generator = torch.Generator().manual_seed(20)
    out_features, in_features = shape
    is_large = out_features * in_features > _LARGEST_NOISE_ELEMENTS
    rows, weight = noise_operands(largest, 2 if is_large else out_features, in_features, generator)
    rows = rows.to(device, dtype)
    if not is_large:
        product = make_product(weight.to(device, dtype))
    expected = torch.cat([product(tile) for tile in torch.split(rows, REFERENCE_ROWS)])
    moved = torch.randperm(largest, generator=generator)

    def is_admitted(count: int) -> bool:
        picked = moved[:count].to(device)
        last = slice(largest - count, largest)
        return torch.equal(product(rows[picked]), expected[picked]) and torch.equal(product(rows[last]), expected[last])

    counts = [count for count in ROW_COUNTS if count <= largest and count != REFERENCE_ROWS and is_admitted(count)]
    return RowCounts(tuple(sorted([*counts, REFERENCE_ROWS])))


def common_counts(counts: Iterable[RowCounts]) -> RowCounts:
    """Return the row counts admitted by all; the reference tile is one of them."""
    sets = [set(each.admitted) for each in counts]
    return RowCounts(tuple(sorted(set.intersection(*sets))))


def products_agree(
    row_counts: Sequence[int], *, inner: int, out: int, device: torch.device, transposed: bool
) -> list[int]:
    """Return those of `row_counts` with which a batched float32 product gives the bits that the last one gives.

    Problems are [rows, inner] x [inner, out]; `transposed`: the right side is stored as [out, inner]. Batches of 1, 2,
    3, 8 and 33 problems are compared, because the kernel may be chosen by the total size.
    """
    generator = torch.Generator().manual_seed(21)
    largest = max(row_counts)
    operands = [noise_operands(largest, out, inner, generator) for _ in range(3)]
    left = torch.stack([rows for rows, _ in operands]).to(device).repeat(11, 1, 1)
    right = torch.stack([weight for _, weight in operands]).to(device).repeat(11, 1, 1)
    right = right if transposed else right.transpose(1, 2).contiguous()

    def multiply(batch: int, count: int) -> Tensor:
        factor = right[:batch].transpose(1, 2) if transposed else right[:batch]
        return torch.bmm(left[:batch, :count].contiguous(), factor)

    expected = multiply(33, row_counts[-1])

    def agrees(count: int) -> bool:
        return all(torch.equal(multiply(batch, count), expected[:batch, :count]) for batch in (1, 2, 3, 8, 33))

    return [count for count in row_counts if agrees(count)]


def fold_halves(parts: Tensor) -> Tensor:
    """Sum [outer, parts, ...] over its second dimension: the upper half onto the lower, until one part is left.

    Halves are those of the next power of two, so appending zeros leaves the result as it was, which no library
    reduction promises. Overwrites its argument.
    """
    while (count := parts.shape[1]) > 1:
        half = 1 << (count - 1).bit_length() - 1
        parts[:, : count - half].add_(parts[:, half:])
        parts = parts[:, :half]
    return parts[:, 0]


def silu_times(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up in float32, rounding alike at every position.

    gate, up: [rows, inner] float32 or bfloat16.
    """
    gate = gate.float()
    denominator = torch.neg(gate).exp_().add_(1.0)
    return torch.div(gate, denominator, out=denominator).mul_(up)

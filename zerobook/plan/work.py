"""Operations of a micro-batch, from which the time of a step is computed. Imports nothing heavy."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple


class Product(NamedTuple):
    """Product of ``batch`` pairs of matrices [rows, depth] and [depth, columns]."""

    batch: int
    rows: int
    depth: int
    columns: int
    element_bytes: int

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.rows * self.depth * self.columns

    @property
    def moved_bytes(self) -> float:
        """Bytes of both factors and of the result."""
        elements = self.rows * self.depth + self.depth * self.columns + self.rows * self.columns
        return float(self.batch * elements * self.element_bytes)


@dataclass
class Work:
    """Operations of one micro-batch on a rank's device, forward and backward, by kind."""

    # each product with the number of times that it runs
    products: Counter[Product] = field(default_factory=Counter)
    # (length of the rows, floating-point operations) of each fused attention -> the number of times that it runs
    attention: Counter[tuple[int, float]] = field(default_factory=Counter)
    # bytes that all other operations read and write
    moved_bytes: float = 0.0
    # weights that are unpacked from 4 or 8 bits, counted each time
    dequantised_elements: int = 0
    # operations that start a kernel
    kernels: int = 0

    def add(self, other: Work) -> None:
        self.products.update(other.products)
        self.attention.update(other.attention)
        self.moved_bytes += other.moved_bytes
        self.dequantised_elements += other.dequantised_elements
        self.kernels += other.kernels

    @property
    def flops(self) -> float:
        """Floating-point operations of all products and of attention."""
        products = sum(times * product.flops for product, times in self.products.items())
        return products + sum(times * flops for (_, flops), times in self.attention.items())

"""Comparison of the ranks' copies of replicated weights."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

import torch
import torch.distributed as dist

from zerobook.strategy.mesh import Mesh

_NUMBERS_AT_ONCE = 1 << 24
"""Numbers of a weight that are summed at once."""
_MOST_POSITIONS = 16
"""Positions of each rank that are reported of a weight that differs."""


class Replicas(NamedTuple):
    """A difference between the ranks' copies of the weights.

    Attributes:
        name: the first tensor that differs.
        tensors: the number of tensors that differ.
        checksums: of the first one, by rank.
        positions: elements of the flattened tensor in which ranks differ from rank 0.
        values: the numbers at these positions, by rank.
    """

    name: str
    tensors: int
    checksums: list[int]
    positions: list[int]
    values: list[list[float]]

    def describe(self, read: Callable[[str, int], float] | None) -> str:
        """Return a sentence that names the rank whose copy differs, and the values.

        Args:
            read: (name, position) -> the value in the last checkpoint, which decides if there is no majority.
        """
        position = 0
        values = [math.nan] * len(self.values)
        if self.positions:
            # Only the first differing element is compared and printed.
            position = self.positions[0]
            values = [values_of_rank[0] for values_of_rank in self.values]
        majority, votes = Counter(self.checksums).most_common(1)[0]
        ranks: list[int] = []
        # More than half of the ranks agree, so the others are wrong.
        if votes > len(self.checksums) / 2:
            ranks = [rank for rank, checksum in enumerate(self.checksums) if checksum != majority]
        elif read is not None:
            ranks = _find_far_off(values, read(self.name, position))
        if len(ranks) == 1:
            sentence = f"rank {ranks[0]}'s copy of {self.name} differs from those of the other ranks"
        else:
            sentence = f"the copies of {self.name} on ranks {ranks or list(range(len(values)))} differ"
        listed = ", ".join(f"{value:.6g} on rank {rank}" for rank, value in enumerate(values))
        sentence += f" (element {position}: {listed})"
        if self.tensors > 1:
            sentence += f", and {self.tensors - 1} more tensors differ"
        return sentence


def _find_far_off(values: list[float], before: float) -> list[int]:
    """Return the rank whose value is ten times as far from ``before`` as any other's, in a list; empty if there is none."""
    distances = []
    for value in values:
        # A value that is not finite is farther off than every number.
        distances.append(abs(value - before) if math.isfinite(value) else math.inf)
    farthest = max(distances)
    rank = distances.index(farthest)
    second_farthest = max(distances[:rank] + distances[rank + 1 :])
    if farthest > 10 * second_farthest:
        return [rank]
    return []


def compare_replicas(mesh: Mesh, named: Sequence[tuple[str, torch.Tensor]]) -> Replicas | None:
    """Return how the ranks' copies of the weights differ; None if they are equal. Collective.

    The ranks first compare a checksum of each weight. Then they compare the elements of the first weight that differs.
    """
    # A checksum has 8 bytes, so little is sent.
    sums = torch.stack([_sum_of_bits(parameter) for _, parameter in named])
    sums_of_ranks = [torch.empty_like(sums) for _ in range(mesh.world_size)]
    dist.all_gather(sums_of_ranks, sums)
    table = torch.stack(sums_of_ranks)
    # One row for each rank, one column for each weight.
    differs = (table != table[0]).any(dim=0)
    differing = differs.nonzero().flatten().tolist()
    if not differing:
        return None
    # All ranks see the same table, so all of them compare the same weight here.
    first = differing[0]
    name, parameter = named[first]
    bits = _bits(parameter)
    reference = bits.clone()
    # The same memory as bytes: neither NCCL nor gloo sends 2-byte integers.
    dist.broadcast(reference.view(torch.uint8), src=0)
    differing_here = (bits != reference).nonzero().flatten()[:_MOST_POSITIONS].tolist()
    positions = sorted(set(chain.from_iterable(mesh.gather(differing_here))))
    values = mesh.gather(parameter.detach().flatten()[positions].float().tolist())
    return Replicas(name, len(differing), table[:, first].tolist(), positions, values)


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of the bits, int64 []. torch copies what it sums to int64 first, so a large weight is summed in pieces."""
    pieces = _bits(tensor).split(_NUMBERS_AT_ONCE)
    return torch.stack([piece.sum(dtype=torch.int64) for piece in pieces]).sum()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the flattened tensor as integers, so that NaNs with the same bits are equal."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().reshape(-1).view(integers[tensor.element_size()])

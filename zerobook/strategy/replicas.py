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
        ranks: those that should hold the same copy of it.
        checksums: of the first tensor, by place in ``ranks``, as all lists below.
        positions: elements of the flattened copy in which ranks differ from the first one.
        values: the numbers at these positions.
        is_shard: the copies are shards, so a position in one is none in the weight.
    """

    name: str
    tensors: int
    ranks: list[int]
    checksums: list[int]
    positions: list[int]
    values: list[list[float]]
    is_shard: bool = False

    def describe(self, read: Callable[[str, int], float] | None) -> str:
        """Return a sentence that names the rank whose copy differs, and the values.

        Args:
            read: (name, position) -> the value in the last checkpoint, which decides if there is no majority.
        """
        # Only the first differing element is compared and printed.
        position = 0
        values = [math.nan] * len(self.ranks)
        if self.positions:
            position = self.positions[0]
            values = [numbers[0] for numbers in self.values]
        # A shard's positions are not those of the weight that a checkpoint holds.
        value_before = None
        if read is not None and not self.is_shard:
            value_before = read(self.name, position)
        wrong_ranks = self._find_wrong_ranks(values, value_before)
        if len(wrong_ranks) == 1:
            noun = "shard" if self.is_shard else "copy"
            sentence = f"rank {wrong_ranks[0]}'s {noun} of {self.name} differs from those of the other ranks"
        else:
            sentence = f"the copies of {self.name} on ranks {wrong_ranks or self.ranks} differ"
        listed = ", ".join(f"{value:.6g} on rank {rank}" for rank, value in zip(self.ranks, values, strict=True))
        sentence += f" (element {position}: {listed})"
        if self.tensors > 1:
            sentence += f", and {self.tensors - 1} more tensors differ"
        return sentence

    def _find_wrong_ranks(self, values: Sequence[float], value_before: float | None) -> list[int]:
        """Return the ranks that a majority, or else the last checkpoint, says are wrong; empty if neither does."""
        majority, votes = Counter(self.checksums).most_common(1)[0]
        if votes > len(self.checksums) / 2:
            return [rank for rank, checksum in zip(self.ranks, self.checksums, strict=True) if checksum != majority]
        if value_before is None:
            return []
        distances = {}
        for rank, value in zip(self.ranks, values, strict=True):
            # A value that is not finite is farther off than every number.
            distances[rank] = abs(value - value_before) if math.isfinite(value) else math.inf
        *_, second, farthest = sorted(distances, key=distances.__getitem__)
        # Ten times as far from the checkpoint as any other value.
        return [farthest] if distances[farthest] > 10 * distances[second] else []


def compare_replicas(mesh: Mesh, groups: Sequence[Sequence[int]], named: Sequence[tuple[str, torch.Tensor]]) -> Replicas | None:
    """Return how the ranks' copies of the weights differ; None if they are equal. Collective over all ranks.

    The ranks first compare a checksum of each weight. Then they compare the elements of the first weight that differs.

    Args:
        groups: the ranks that should hold the same numbers; each rank is in one group.
        named: name -> what this rank holds of the weight, the same names in the same order on every rank.
    """
    # A checksum has 8 bytes, so little is sent.
    sums = torch.stack([_sum_of_bits(parameter) for _, parameter in named])
    # NCCL sends nothing that lies in host memory, as offloaded weights do.
    sums = sums.to(mesh.device)
    sums_of_ranks = [torch.empty_like(sums) for _ in range(mesh.world_size)]
    dist.all_gather(sums_of_ranks, sums)
    # One row for each rank, one column for each weight.
    all_checksums = torch.stack(sums_of_ranks)
    expected = all_checksums.clone()
    for group in groups:
        expected[list(group)] = all_checksums[group[0]]
    differs = all_checksums != expected
    differing = differs.any(dim=0).nonzero().flatten().tolist()
    if not differing:
        return None
    # All ranks have the same checksums, so all of them compare the same weight of the same group here.
    first = differing[0]
    name, parameter = named[first]
    ranks_that_differ = differs[:, first].nonzero().flatten().tolist()
    ranks = next(list(group) for group in groups if ranks_that_differ[0] in group)
    bits = _bits(parameter).to(mesh.device)
    # Ranks of other groups receive too, and their shard may have another size.
    size = mesh.gather(bits.numel())[ranks[0]]
    reference = bits.clone() if mesh.rank == ranks[0] else bits.new_empty(size)
    # The same memory as bytes: neither NCCL nor gloo sends 2-byte integers.
    dist.broadcast(reference.view(torch.uint8), src=ranks[0])
    differing_here: list[int] = []
    if mesh.rank in ranks:
        differing_here = (bits != reference).nonzero().flatten()[:_MOST_POSITIONS].tolist()
    positions = sorted(set(chain.from_iterable(mesh.gather(differing_here))))
    values_here: list[float] = []
    if mesh.rank in ranks:
        values_here = parameter.detach().flatten()[positions].float().tolist()
    values_of_ranks = mesh.gather(values_here)
    values = [values_of_ranks[rank] for rank in ranks]
    checksums = all_checksums[ranks, first].tolist()
    return Replicas(name, len(differing), ranks, checksums, positions, values, is_shard=len(groups) > 1)


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of the bits, int64 []. torch copies what it sums to int64 first, so a large weight is summed in pieces."""
    pieces = _bits(tensor).split(_NUMBERS_AT_ONCE)
    return torch.stack([piece.sum(dtype=torch.int64) for piece in pieces]).sum()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the flattened tensor as integers, so that NaNs with the same bits are equal."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().reshape(-1).view(integers[tensor.element_size()])

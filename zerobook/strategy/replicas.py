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

# Maximum number of elements of a weight that are summed at once.
_NUMBERS_AT_ONCE = 1 << 24
# Maximum number of differing positions that each rank reports.
_MOST_POSITIONS = 16


class ReplicaDifference(NamedTuple):
    """A difference between the ranks' copies of the weights.

    Attributes:
        name: the first tensor that differs.
        tensors: the number of tensors that differ.
        ranks: those that should hold the same copy of it.
        checksums: the checksum of each rank's copy of the first tensor, in the order of ``ranks``.
        positions: elements of the flattened copy in which a rank differs from the first rank.
        values: each rank's numbers at these positions, in the order of ``ranks``.
        is_shard: the copies are shards, so a position in a copy is not a position in the weight.
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
            read: (name, position) -> the value in the last checkpoint, which decides if there is no majority; None without one.
        """
        # Only the first differing element is compared and printed.
        position = 0
        values = [math.nan] * len(self.ranks)
        if self.positions:
            position = self.positions[0]
            values = [numbers[0] for numbers in self.values]
        # A checkpoint holds complete weights, in which a shard's positions mean other elements.
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
        """Return the ranks whose copies are wrong by a majority, or else by the last checkpoint; empty if neither decides.

        Args:
            values: one number of each rank's copy, in the order of ``ranks``.
            value_before: the same number in the last checkpoint; None if it is not known.
        """
        majority, votes = Counter(self.checksums).most_common(1)[0]
        if votes > len(self.checksums) / 2:
            return [rank for rank, checksum in zip(self.ranks, self.checksums, strict=True) if checksum != majority]
        if value_before is None:
            return []
        distances = {}
        for rank, value in zip(self.ranks, values, strict=True):
            # A value that is not finite counts as farther away than every number.
            distances[rank] = abs(value - value_before) if math.isfinite(value) else math.inf
        # A rank is wrong if its value is more than ten times as far from the checkpoint as every other value.
        *_, second_farthest, farthest = sorted(distances, key=distances.__getitem__)
        return [farthest] if distances[farthest] > 10 * distances[second_farthest] else []


def compare_replicas(
    mesh: Mesh, groups: Sequence[Sequence[int]], named: Sequence[tuple[str, torch.Tensor]]
) -> ReplicaDifference | None:
    """Return how the ranks' copies of the weights differ; None if they are equal. Collective over all ranks.

    The ranks first compare a checksum of each weight. Then they compare the elements of the first weight that differs.

    Args:
        groups: groups of ranks that should hold the same numbers. Each rank is in one group.
        named: (name, this rank's copy or shard) of each weight. All ranks have the same names in the same order.
    """
    # A checksum has 8 bytes, so little is sent.
    sums = torch.stack([_compute_checksum(parameter) for _, parameter in named])
    # NCCL cannot send from host memory, where the sums of offloaded weights are.
    sums = sums.to(mesh.device)
    sums_of_ranks = [torch.empty_like(sums) for _ in range(mesh.world_size)]
    dist.all_gather(sums_of_ranks, sums)
    # One row for each rank, one column for each weight.
    all_checksums = torch.stack(sums_of_ranks)
    # Compare each rank with the first rank of its group.
    expected = all_checksums.clone()
    for group in groups:
        expected[list(group)] = all_checksums[group[0]]
    differs = all_checksums != expected
    differing = differs.any(dim=0).nonzero().flatten().tolist()
    if not differing:
        return None
    # All ranks have the checksums of all ranks, so they choose the same weight of the same group.
    first = differing[0]
    name, parameter = named[first]
    ranks_that_differ = differs[:, first].nonzero().flatten().tolist()
    ranks = next(list(group) for group in groups if ranks_that_differ[0] in group)
    positions, values = _compare_elements(mesh, ranks, parameter)
    checksums = all_checksums[ranks, first].tolist()
    return ReplicaDifference(name, len(differing), ranks, checksums, positions, values, is_shard=len(groups) > 1)


# Return (positions, values) of `ReplicaDifference` for the copies of one weight on ``ranks``. Collective over all ranks.
def _compare_elements(mesh: Mesh, ranks: list[int], parameter: torch.Tensor) -> tuple[list[int], list[list[float]]]:
    bits = _view_as_integers(parameter).to(mesh.device)
    # The collectives below are over all ranks. A rank of another group takes part, and its own shard may have another size.
    size = mesh.gather(bits.numel())[ranks[0]]
    reference = bits.clone() if mesh.rank == ranks[0] else bits.new_empty(size)
    # Send bytes, since neither NCCL nor gloo sends 2-byte integers.
    dist.broadcast(reference.view(torch.uint8), src=ranks[0])
    # Each rank finds where its copy differs from that of the first rank. Then all report their values at all these positions.
    differing_here: list[int] = []
    if mesh.rank in ranks:
        differing_here = (bits != reference).nonzero().flatten()[:_MOST_POSITIONS].tolist()
    positions = sorted(set(chain.from_iterable(mesh.gather(differing_here))))
    values_here: list[float] = []
    if mesh.rank in ranks:
        values_here = parameter.detach().flatten()[positions].float().tolist()
    values_of_ranks = mesh.gather(values_here)
    return positions, [values_of_ranks[rank] for rank in ranks]


def _compute_checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of the elements' bits, each read as an integer: an int64 tensor without dimensions."""
    # torch copies what it sums to int64 first, which takes much memory, so a large weight is summed in pieces.
    pieces = _view_as_integers(tensor).split(_NUMBERS_AT_ONCE)
    return torch.stack([piece.sum(dtype=torch.int64) for piece in pieces]).sum()


def _view_as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the flattened tensor as integers, so that NaNs with the same bits are equal."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().reshape(-1).view(integers[tensor.element_size()])

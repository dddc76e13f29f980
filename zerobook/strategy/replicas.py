"""Comparison of the ranks' copies of replicated weights."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from zerobook.strategy.mesh import Mesh

_PART = 1 << 24
"""Numbers of a weight that are summed at once."""


class Replicas(NamedTuple):
    """A difference between the ranks' copies of the weights.

    ``tensors`` tensors differ. ``name`` is the first of them, with each rank's checksum, the ``places`` (flattened) where ranks
    differ from rank 0, and each rank's ``values`` there."""

    name: str
    tensors: int
    checksums: list[int]
    places: list[int]
    values: list[list[float]]

    def words(self, read: Callable[[str, int], float] | None) -> str:
        """Return a sentence that names the rank whose copy differs, and the values.

        Args:
            read: (name, place) -> the value in the last checkpoint, which decides if there is no majority.
        """
        counts = Counter(self.checksums)
        place = self.places[0] if self.places else 0
        there = [values[0] if values else math.nan for values in self.values]
        majority, votes = counts.most_common(1)[0]
        if votes > len(self.checksums) / 2:
            ranks = [rank for rank, checksum in enumerate(self.checksums) if checksum != majority]
        else:
            ranks = self._far_off(there, read(self.name, place)) if read is not None else []
        if len(ranks) == 1:
            who = f"rank {ranks[0]}'s copy of {self.name} is not the others'"
        else:
            who = f"the copies of {self.name} on ranks {ranks or list(range(len(there)))} differ"
        others = ", ".join(f"{value:.6g} on rank {rank}" for rank, value in enumerate(there))
        more = f", and {self.tensors - 1} more tensors differ" if self.tensors > 1 else ""
        return f"{who} (element {place}: {others}){more}"

    @staticmethod
    def _far_off(values: list[float], before: float) -> list[int]:
        """Return the rank whose value is ten times as far from ``before`` as any other's, in a list; empty if there is none."""
        far = [abs(value - before) if math.isfinite(value) else math.inf for value in values]
        odd = far.index(max(far))
        return [odd] if all(far[odd] > 10 * other for rank, other in enumerate(far) if rank != odd) else []


def differing(mesh: Mesh, named: Sequence[tuple[str, torch.Tensor]]) -> Replicas | None:
    """Return how the ranks' weights differ; None if all are the same. Reads every weight once, and the first that differs
    again. Collective."""
    sums = torch.stack([_sum_of_bits(p) for _, p in named])
    every = [torch.empty_like(sums) for _ in range(mesh.world_size)]
    dist.all_gather(every, sums)
    table = torch.stack(every)
    odd_ones = (table != table[0]).any(dim=0).nonzero().flatten().tolist()
    if not odd_ones:
        return None
    name, parameter = named[odd_ones[0]]
    mine = _bits(parameter)
    reference = mine.clone()
    dist.broadcast(reference.view(torch.uint8), src=0)  # the same memory; neither NCCL nor gloo sends 2-byte integers
    odd = (mine != reference).nonzero().flatten()[:16].tolist()
    places = sorted({place for rank in mesh.gather(odd) for place in rank})
    values = mesh.gather(parameter.detach().flatten()[places].float().tolist())
    return Replicas(name, len(odd_ones), table[:, odd_ones[0]].tolist(), places, values)


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of the bits, int64 []. torch copies what it sums to int64 first, so a large weight is summed in parts."""
    return torch.stack([part.sum(dtype=torch.int64) for part in _bits(tensor).split(_PART)]).sum()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the flattened tensor as integers, so that NaNs with the same bits are equal."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().reshape(-1).view(integers[tensor.element_size()])

"""Weights that a rank gathers for a micro-batch, in the order of its forward and backward pass.

FSDP2 gathers layers for both passes. ZeRO-3 records the order in which modules run, and then follows it. It prefetches the
weights of later modules as far as its limits allow. It keeps weights that are used again soon, or whose next use the
prefetch has already reached, and frees the others. Freed weights are gathered again for the backward pass, for another
module that shares the weight, or for a module that activation checkpointing runs twice. This module makes each of these
decisions as `PartitionedParameterCoordinator` of DeepSpeed 0.19.8 does. Its results were compared with live runs.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from zerobook.plan.sharding import ShardingSpec
from zerobook.plan.state_bytes import Weight, count_elements


class Visit(NamedTuple):
    """The start or the end of a module's forward or backward pass.

    The backward pass of a module starts when its output has a gradient, and ends when its input has one. An end may be missing:
    activation checkpointing stops a second forward pass when it has the tensors that it needs, and token ids have no gradient.
    """

    # path in the model
    module: str
    # the weights of the module itself, without those of the modules in it
    weight_names: tuple[str, ...]
    backward: bool = False
    end: bool = False


@dataclass
class Gathers:
    """Weights of one micro-batch's passes, each listed as often as it is gathered."""

    forward: list[Weight] = field(default_factory=list)
    # with the gathers of modules that activation checkpointing runs again
    backward: list[Weight] = field(default_factory=list)
    # the most elements that ZeRO-3 has gathered at once, without the small weights that stay gathered
    peak_elements: int = 0

    @property
    def all(self) -> list[Weight]:
        return self.forward + self.backward


def follow_gathers(
    weights: Sequence[Weight], sharding: ShardingSpec, visits: Sequence[Visit] = (), accumulation: int = 1
) -> Gathers:
    """Return the weights that a rank gathers for a micro-batch, in a step in which ZeRO-3 knows the order of the modules.

    Args:
        visits: the visits of a complete micro-batch, as `zerobook.plan.trace` records them; without visits, modules are
            assumed to run in the order of their weights, and backward in reverse order.
        accumulation: micro-batches of a step.
    """
    if sharding.kind == "fsdp":
        # Weights outside the layers stay gathered after the forward pass.
        return Gathers(list(weights), [weight for weight in weights if weight.unit and sharding.reshards])
    if sharding.stage < 3:
        return Gathers()
    coordinator = _Coordinator(weights, visits or _visits_in_order(weights), sharding)
    # If each step has one micro-batch, it starts with the small weights: they are gathered after the optimizer's step.
    available = set()
    if accumulation == 1:
        available = {weight.name for weight in weights if weight.numel <= sharding.persistence_threshold}
    # The first passes only decide where weights are freed. They gather other weights than all later passes.
    coordinator.follow(available)
    return coordinator.follow(coordinator.available)


class _Coordinator:
    """ZeRO-3's coordinator of one rank. The first passes decide where each weight is freed; later passes use these
    decisions."""

    def __init__(self, weights: Sequence[Weight], visits: Sequence[Visit], sharding: ShardingSpec):
        self.visits = visits
        self.sharding = sharding
        # names of the weights that are gathered at this moment
        self.available: set[str] = set()
        weights_by_name = {weight.name: weight for weight in weights}
        # module -> its weights
        self._weights_of: dict[str, list[Weight]] = {}
        # (weight, position) of every use, where the position is the number of modules that have started before
        self._uses: list[tuple[Weight, int]] = []
        # weight name -> positions of its uses
        self._positions: dict[str, list[int]] = defaultdict(list)
        # position -> elements of the weights that are used before it, also of small weights
        self._elements_before = [0]
        for visit in visits:
            module_weights = [weights_by_name[name] for name in visit.weight_names]
            self._weights_of[visit.module] = module_weights
            if visit.end:
                continue
            position = len(self._elements_before) - 1
            self._elements_before.append(self._elements_before[-1] + count_elements(module_weights))
            for weight in module_weights:
                self._uses.append((weight, position))
                self._positions[weight.name].append(position)
        # (position, weight name) -> whether the weight stays gathered when a module ends there
        self._keeps: dict[tuple[int, str], bool] = {}

    def follow(self, available: set[str]) -> Gathers:
        """Return what one micro-batch gathers.

        Args:
            available: names of the weights that are gathered when it starts.
        """
        self.available = set(available)
        self._gathers = Gathers()
        self._live_elements = 0
        # uses that the prefetch has not reached
        self._coming = deque(self._uses)
        # weight name -> position of the last use that the prefetch has reached
        self._prefetched_use: dict[str, int] = {}
        # weight name -> modules that are running and use it
        self._users: dict[str, set[str]] = defaultdict(set)
        position = 0
        is_backward = False
        for visit in self.visits:
            # After the first gradient, a forward pass of a module belongs to the backward pass: it is run a second time.
            is_backward = is_backward or visit.backward
            if visit.end:
                self._end_module(visit.module, position)
            else:
                self._start_module(visit.module, position, is_backward)
                position += 1
        # Free the weights of modules whose end is missing.
        for module_weights in self._weights_of.values():
            for weight in module_weights:
                if self._users[weight.name] and weight.numel > self.sharding.persistence_threshold:
                    self.available.discard(weight.name)
        return self._gathers

    def _start_module(self, module: str, position: int, is_backward: bool) -> None:
        """Gather a module's weights, and prefetch those of later modules."""
        gathered = self._gathers.backward if is_backward else self._gathers.forward
        # names of the module's weights that the prefetch has not reached
        not_reached = set()
        for weight in self._weights_of[module]:
            self._gather(weight, gathered)
            if self._prefetched_use.get(weight.name, -1) < position:
                not_reached.add(weight.name)
        # If the prefetch is behind this module, it continues after it.
        while self._coming and not_reached:
            weight, use = self._coming.popleft()
            self._prefetched_use[weight.name] = use
            not_reached.discard(weight.name)
        # One limit is for the elements of all gathered weights, the other for those of one prefetch.
        room = min(self.sharding.max_live_elements - self._live_elements, self.sharding.prefetch_bucket_elements)
        while self._coming and room > 0:
            weight, use = self._coming.popleft()
            self._prefetched_use[weight.name] = max(self._prefetched_use.get(weight.name, -1), use)
            if self._gather(weight, gathered):
                room -= weight.numel
        self._gathers.peak_elements = max(self._gathers.peak_elements, self._live_elements)
        for weight in self._weights_of[module]:
            self._users[weight.name].add(module)

    def _gather(self, weight: Weight, gathered: list[Weight]) -> bool:
        """Gather a weight unless it is available, and return whether it was gathered now."""
        if weight.name in self.available:
            return False
        self.available.add(weight.name)
        self._live_elements += weight.numel
        gathered.append(weight)
        return True

    def _end_module(self, module: str, position: int) -> None:
        """Free the module's weights, except those that another running module uses, and those that are kept for later."""
        for weight in self._weights_of[module]:
            self._users[weight.name].discard(module)
            is_needed = self._keeps_weight(weight, position) or self._users[weight.name]
            if not is_needed and weight.name in self.available:
                self.available.remove(weight.name)
                self._live_elements -= weight.numel

    def _keeps_weight(self, weight: Weight, position: int) -> bool:
        """Return whether a weight stays gathered when a module ends and the next one starts at ``position``. A decision is
        made once, and used in all later passes."""
        key = (position, weight.name)
        if key not in self._keeps:
            self._keeps[key] = (
                weight.numel <= self.sharding.persistence_threshold
                or self._prefetched_use.get(weight.name, -1) > position
                or self._is_used_soon(weight, position)
            )
        return self._keeps[key]

    def _is_used_soon(self, weight: Weight, position: int) -> bool:
        for use in self._positions[weight.name]:
            distance = self._elements_before[use] - self._elements_before[position]
            if use >= position and distance < self.sharding.max_reuse_elements:
                return True
        return False


def _visits_in_order(weights: Sequence[Weight]) -> list[Visit]:
    """Return the visits of modules that run in the order of their weights, and backward in reverse order."""
    names_by_module: dict[str, list[str]] = {}
    for weight in weights:
        module = weight.name.rpartition(".")[0] or weight.name
        names_by_module.setdefault(module, []).append(weight.name)
    visits = []
    for is_backward in (False, True):
        modules = reversed(names_by_module) if is_backward else names_by_module
        for module in modules:
            visits.append(Visit(module, tuple(names_by_module[module]), is_backward))
            visits.append(Visit(module, tuple(names_by_module[module]), is_backward, end=True))
    return visits

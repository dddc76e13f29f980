"""Weights that a rank gathers for a micro-batch, in the order of its forward and backward pass.

FSDP2 gathers layers for both passes. ZeRO-3 records the order in which modules run, and then follows it. It prefetches the
weights of later modules as far as its limits allow. It keeps weights that are used again soon, or whose next use the
prefetch has already passed, and frees the others. Freed weights are gathered again for the backward pass, for another
module that shares the weight, or for a module that activation checkpointing runs twice. This module follows each of these
decisions. Read from DeepSpeed 0.19.8, `PartitionedParameterCoordinator`, and counted in live runs.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import NamedTuple

from zerobook.plan.sharding import ShardingSpec
from zerobook.plan.state_bytes import Weight


class Visit(NamedTuple):
    """A moment in the passes: ``module`` is about to run, or with ``back`` the gradient of its output is available. With
    ``end``, the module has run, or its input has its gradient. ``names`` are the module's own weights; many modules have none.

    An end may be missing: activation checkpointing stops a second run when it has the tensors that it needs, and in the
    backward pass token ids have no gradient.
    """

    module: str
    names: tuple[str, ...]
    back: bool = False
    end: bool = False


@dataclass
class Gathered:
    """Weights of one micro-batch's passes, each listed as often as it is gathered: ``forward`` in the forward pass,
    ``again`` in the backward pass, including modules that run a second time there. ``most`` is the largest number of
    elements that ZeRO-3 has gathered at once, without the small weights that stay gathered."""

    forward: list[Weight] = field(default_factory=list)
    again: list[Weight] = field(default_factory=list)
    most: int = 0

    @property
    def all(self) -> list[Weight]:
        return self.forward + self.again


def gathered(weights: Sequence[Weight], spread: ShardingSpec, visits: Sequence[Visit] = (), accumulation: int = 1) -> Gathered:
    """Return what is gathered, once the order is known.

    Args:
        visits: the visits of a whole micro-batch, as `zerobook.plan.trace` records them; without visits, modules are
            assumed to run in the order of their weights, and backward in reverse order.
    """
    if spread.kind == "fsdp":
        return Gathered(list(weights), [w for w in weights if w.unit and spread.reshards])
    if spread.stage < 3:
        return Gathered()
    known = {w.name: w for w in weights}
    coordinator = _Coordinator(known, visits or _as_listed(weights), spread)
    # The first micro-batch has freed all weights; small weights are gathered again after the optimizer's step.
    coordinator.follow({w.name for w in weights if w.numel <= spread.persistent} if accumulation == 1 else set())
    return coordinator.follow(coordinator.here)


class _Coordinator:
    """ZeRO-3's coordinator of one rank. The first passes that follow the order decide where each weight is freed; later
    passes keep these decisions."""

    def __init__(self, known: dict[str, Weight], visits: Sequence[Visit], spread: ShardingSpec):
        self.visits, self.spread = visits, spread
        self.here: set[str] = set()
        self._own = {visit.module: [known[name] for name in visit.names] for visit in visits}
        self._order = [self._own[visit.module] for visit in visits if not visit.end]
        self._before = [0, *accumulate(sum(w.numel for w in some) for some in self._order)]  # elements, small weights included
        self._uses: dict[str, list[int]] = defaultdict(list)
        for at, some in enumerate(self._order):
            for weight in some:
                self._uses[weight.name].append(at)
        self._kept: dict[tuple[int, str], bool] = {}

    def follow(self, here: set[str]) -> Gathered:
        """Follow one micro-batch's passes, which start with the weights ``here`` gathered."""
        self.here, found = set(here), Gathered()
        coming = deque((weight, at) for at, some in enumerate(self._order) for weight in some)
        looked_at: dict[str, int] = {}  # the last use that the prefetch has seen
        users: dict[str, set[str]] = defaultdict(set)
        at = live = 0
        turned = False
        for visit in self.visits:
            own = self._own[visit.module]
            turned = turned or visit.back  # modules that run from here on run a second time
            if visit.end:
                for weight in own:
                    users[weight.name].discard(visit.module)
                    if not self._keeps(weight, at, looked_at) and not users[weight.name] and weight.name in self.here:
                        self.here.remove(weight.name)
                        live -= weight.numel
                continue
            new = [w for w in own if w.name not in self.here]
            live += sum(w.numel for w in new)
            self.here |= {w.name for w in new}
            late = {w.name for w in own if looked_at.get(w.name, -1) < at}
            while coming and late:
                weight, use = coming.popleft()
                looked_at[weight.name] = use
                late.discard(weight.name)
            room = min(self.spread.live - live, self.spread.prefetch_bucket)
            while coming and room > 0:
                weight, use = coming.popleft()
                looked_at[weight.name] = max(looked_at.get(weight.name, -1), use)
                if weight.name not in self.here:
                    new.append(weight)
                    self.here.add(weight.name)
                    live += weight.numel
                    room -= weight.numel
            (found.again if turned else found.forward).extend(new)
            found.most = max(found.most, live)
            for weight in own:
                users[weight.name].add(visit.module)
            at += 1
        # after the backward pass no weight is in use
        self.here -= {w.name for own in self._own.values() for w in own if users[w.name] and w.numel > self.spread.persistent}
        return found

    def _keeps(self, weight: Weight, at: int, looked_at: dict[str, int]) -> bool:
        """Return whether a weight stays gathered when a module ends before visit ``at``."""
        key = (at, weight.name)
        if key not in self._kept:
            self._kept[key] = (
                weight.numel <= self.spread.persistent
                or looked_at.get(weight.name, -1) > at
                or any(self._before[use] - self._before[at] < self.spread.reuse for use in self._uses[weight.name] if use >= at)
            )
        return self._kept[key]


def _as_listed(weights: Sequence[Weight]) -> list[Visit]:
    names = groupby((w.name for w in weights), key=lambda name: name.rpartition(".")[0] or name)
    modules = [Visit(module, tuple(some)) for module, some in names]
    there_and_back = modules + [visit._replace(back=True) for visit in reversed(modules)]
    return [moment for visit in there_and_back for moment in (visit, visit._replace(end=True))]

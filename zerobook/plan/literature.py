"""The literature's figures for what a strategy file holds and sends, shown beside the libraries'. Imports nothing heavy.

The formulas themselves are in `zerobook.plan.formulas`. This module applies them to a `ShardingSpec` and writes them as text: P
is the number of the model's parameters, T of the trained ones where others are frozen.
"""

from __future__ import annotations

from dataclasses import dataclass

from zerobook.plan import formulas
from zerobook.plan.sharding import ShardingSpec
from zerobook.plan.traffic import Flow, between_nodes, sent


@dataclass(frozen=True, kw_only=True)
class Paper:
    """Figures by the literature's formulas. ``formula`` has each formula as text, with its unit.

    ``states`` are bytes of a rank in all places; ``lying`` names the place of each: ``none`` (the GPU), ``cpu`` or
    ``nvme``. ``sent`` is the bytes that a rank sends in a step by the ring's law. ``between`` is the bytes that leave a
    node in a step by the same law. ``rule`` is the same by the rule of thumb for ZeRO-3 in 2-byte elements, None for other
    strategies.
    """

    states: formulas.States
    lying: dict[str, str]
    sent: float
    between: float
    rule: float | None
    formula: dict[str, str]

    def held(self, place: str) -> float:
        """Return the bytes of a rank's states that are in ``place``."""
        return sum(getattr(self.states, what) for what, where in self.lying.items() if where == place)


def paper(
    parameters: int, trained: int, spread: ShardingSpec, nodes: int, *, density: float = 1.0, states: float = 2.0
) -> Paper:
    """Return the papers' figures. The papers do not cover accumulation: a step is one micro-batch.

    ZeRO, section 5, for states; offloaded states are in host RAM or on disk (ZeRO-Offload, arXiv:2101.06840, and ZeRO-Infinity,
    arXiv:2104.07857). ZeRO, section 7, for traffic. The papers train all parameters; frozen ones are counted here as weights
    without gradients and moments.

    Args:
        density: stored elements for each parameter; below 1 where frozen weights are packed, which the papers do not cover.
        states: numbers of optimizer state for each trained parameter.
    """
    mixed = spread.precision != "no"
    share = spread.shard if spread.stage == 3 else spread.ranks
    whole, part = (
        formulas.model_states(n, spread.stage, share, mixed=mixed, states=states) for n in (parameters * density, trained)
    )
    lying = {"parameters": spread.offload_param, "gradients": spread.offload_optimizer, "optimizer": spread.offload_optimizer}
    legs = _legs(spread, "P" if trained == parameters else "T")
    moved = flows(parameters, trained, spread, density)
    formula = {
        "states": _states(parameters, trained, spread, share, lying, density, states),
        "sent": _written(legs, spread, density=density),
    }
    rule = None
    if nodes > 1:
        formula["between"] = _written([leg for leg in legs if not leg.within], spread, of_a_node=True, density=density)
        if mixed and trained == parameters and spread.stage == 3 and spread.shard == spread.ranks:
            rule, formula["rule"] = formulas.between_nodes_rule(parameters, nodes), f"48 P/{nodes} bits"
    return Paper(
        states=formulas.States(whole.parameters, part.gradients, part.optimizer), lying=lying, sent=sent(moved),
        between=between_nodes(moved, nodes), rule=rule, formula=formula,
    )  # fmt: skip


def flows(parameters: int, trained: int, spread: ShardingSpec, density: float = 1.0) -> list[Flow]:
    """Return what is sent in a step by the papers' law."""
    elements = {"P": parameters * density, "T": trained}
    return [
        Flow(
            leg.what,
            leg.collective,
            leg.worth * spread.compute * elements[leg.letter] / leg.cut,
            leg.ranks,
            within=leg.within,
            rings=leg.rings(spread),
        )
        for leg in _legs(spread, "P" if trained == parameters else "T")
    ]


def _states(
    parameters: int, trained: int, spread: ShardingSpec, share: int, lying: dict[str, str], density: float, states: float
) -> str:
    """Return the formula of weights, gradients and optimizer state as text, such as ``2 P + 2 P/8 + 12 P/8 bytes``; see
    `formulas.model_states`."""
    whole = formulas.model_states(1, 0, 1, mixed=spread.precision != "no", states=states)
    terms = []
    for what, first in (("parameters", 3), ("gradients", 2), ("optimizer", 1)):
        letter = "P" if what == "parameters" or trained == parameters else "T"
        cut = f"/{share}" if spread.stage >= first and share > 1 else ""
        where = {"none": "", "cpu": " (host)", "nvme": " (disk)"}[lying[what]]
        each = getattr(whole, what) * (density if what == "parameters" else 1)
        terms.append(f"{each:g} {letter}{cut}{where}")
    return f"{' + '.join(terms)} bytes"


@dataclass(frozen=True)
class _Leg:
    """A transfer: ``worth`` times the elements of ``letter``, divided by ``cut``, go around a ring of ``ranks``."""

    what: str
    collective: str
    worth: float
    letter: str
    ranks: int
    within: bool
    cut: int = 1

    def rings(self, spread: ShardingSpec) -> int:
        """Return the number of rings that leave a node at once: a ring over the copies for each part on the node."""
        return min(self.cut, spread.node)


def _legs(spread: ShardingSpec, some: str) -> list[_Leg]:
    """Return the transfers of a step. ``some``: the letter of the trained parameters."""
    whole = spread.ranks <= spread.node
    if spread.stage < 3:
        legs = [_Leg("gradients", "all-reduce", formulas.traffic(spread.stage), some, spread.ranks, whole)]
    else:
        forward, backward, gradients = formulas.zero3_worths(
            quantized_weights=spread.quantized_weights, quantized_gradients=spread.quantized_gradients
        )
        n, second = spread.shard, spread.secondary if spread.secondary > 1 else spread.shard
        near = n <= spread.node
        legs = [
            _Leg("weights, forward", "all-gather", forward, "P", n, near),
            _Leg("weights, backward", "all-gather", backward, "P", second, second <= spread.node),
            _Leg("gradients", "reduce-scatter", gradients, some, n, near),
            # hybrid sharding: a rank's part of the gradients is all-reduced over the copies
            _Leg("gradients, copies", "all-reduce", formulas.traffic(0), some, spread.ranks // n, whole, cut=n),
        ]
    return [leg for leg in legs if leg.ranks > 1]


def _written(legs: list[_Leg], spread: ShardingSpec, *, of_a_node: bool = False, density: float = 1.0) -> str:
    """Return transfers as text, such as ``3 x 2 P x 7/8 bytes``. Transfers around the same ring are added. Several rings of
    a kind may leave a node."""
    sums: dict[tuple[str, int], float] = {}
    for leg in legs:
        key = (leg.letter + (f"/{leg.cut}" if leg.cut > 1 else ""), leg.ranks)
        sums[key] = sums.get(key, 0.0) + leg.worth * (leg.rings(spread) if of_a_node else 1)
    element = {letter: f"{spread.compute * (density if letter[0] == 'P' else 1):g}" for letter, _ in sums}
    terms = [f"{worth:g} x {element[letter]} {letter} x {n - 1}/{n}" for (letter, n), worth in sums.items()]
    return f"{' + '.join(terms)} bytes" if terms else "nothing"

"""What the literature says that a strategy file holds and sends, to stand beside what the libraries do. Imports nothing heavy.

The formulas themselves are in `zerobook.plan.formulas`. Here they are applied to a `Spread`, and written out: P stands for the
model's parameters, T for the trained ones where others are frozen.
"""

from __future__ import annotations

from dataclasses import dataclass

from zerobook.plan import formulas
from zerobook.plan.spread import Spread
from zerobook.plan.traffic import Flow, between_nodes, sent


@dataclass(frozen=True, kw_only=True)
class Paper:
    """By the literature's formulas, which ``formula`` spells out with their units.

    Bytes of a rank: ``states`` wherever they lie, which is ``none`` (the GPU), ``cpu`` or ``nvme`` by ``lying``; ``sent`` in a
    step by the ring's law. Bytes of a node: ``between``, what leaves it in a step by the same law; ``rule``, by the rule of
    thumb for ZeRO-3 in 2-byte elements, None elsewhere.
    """

    states: formulas.States
    lying: dict[str, str]
    sent: float
    between: float
    rule: float | None
    formula: dict[str, str]

    def held(self, place: str) -> float:
        """Bytes of a rank's states that lie in ``place``."""
        return sum(getattr(self.states, what) for what, where in self.lying.items() if where == place)


def paper(parameters: int, trained: int, spread: Spread, nodes: int, *, density: float = 1.0, states: float = 2.0) -> Paper:
    """The papers' figures. They know no accumulation: a step is one micro-batch.

    ZeRO, section 5, for states; what is offloaded lies in host RAM or on disk (ZeRO-Offload, arXiv:2101.06840, and
    ZeRO-Infinity, arXiv:2104.07857). ZeRO, section 7, for traffic. They train all parameters; frozen ones are counted here as
    weights without gradients and moments.

    Args:
        density: stored elements for each parameter; below 1 where frozen weights are packed, of which the papers know nothing.
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


def flows(parameters: int, trained: int, spread: Spread, density: float = 1.0) -> list[Flow]:
    """What the papers send in a step."""
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
    parameters: int, trained: int, spread: Spread, share: int, lying: dict[str, str], density: float, states: float
) -> str:
    """``2 P + 2 P/8 + 12 P/8 bytes``: weights, gradients and optimizer state, as `formulas.model_states` has them."""
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
    """``worth`` times the elements of ``letter``, over ``cut``, go around a ring of ``ranks``."""

    what: str
    collective: str
    worth: float
    letter: str
    ranks: int
    within: bool
    cut: int = 1

    def rings(self, spread: Spread) -> int:
        """That leave a node at once: one of the copies for every part that the node has."""
        return min(self.cut, spread.node)


def _legs(spread: Spread, some: str) -> list[_Leg]:
    """``some``: the letter of what is trained."""
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
            # hybrid sharding: what a rank has of the gradients is all-reduced over the copies
            _Leg("gradients, copies", "all-reduce", formulas.traffic(0), some, spread.ranks // n, whole, cut=n),
        ]
    return [leg for leg in legs if leg.ranks > 1]


def _written(legs: list[_Leg], spread: Spread, *, of_a_node: bool = False, density: float = 1.0) -> str:
    """``3 x 2 P x 7/8 bytes``; legs around one ring are added up. Several rings of a kind may leave a node."""
    sums: dict[tuple[str, int], float] = {}
    for leg in legs:
        key = (leg.letter + (f"/{leg.cut}" if leg.cut > 1 else ""), leg.ranks)
        sums[key] = sums.get(key, 0.0) + leg.worth * (leg.rings(spread) if of_a_node else 1)
    element = {letter: f"{spread.compute * (density if letter[0] == 'P' else 1):g}" for letter, _ in sums}
    terms = [f"{worth:g} x {element[letter]} {letter} x {n - 1}/{n}" for (letter, n), worth in sums.items()]
    return f"{' + '.join(terms)} bytes" if terms else "nothing"

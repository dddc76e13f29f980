"""The literature's figures for what a strategy file holds and sends, shown beside the libraries'. Imports nothing heavy.

The formulas themselves are in `zerobook.plan.formulas`. This module applies them to a `ShardingSpec` and writes them as text: P
is the number of the model's parameters, T of the trained ones where others are frozen.
"""

from dataclasses import dataclass

from zerobook.plan import formulas
from zerobook.plan.sharding import ShardingSpec
from zerobook.plan.traffic import Transfer, count_sent, count_sent_between_nodes


@dataclass(frozen=True, kw_only=True)
class PaperFigures:
    """Figures by the literature's formulas."""

    # bytes of a rank in all places
    states: formulas.States
    # bytes of these states on the GPU
    gpu_states: float
    # bytes that a rank sends in a step if collectives run in rings
    sent: float
    # bytes that leave a node in a step, also in rings
    between: float
    # bytes that leave a node in a step by the rule of thumb for ZeRO-3 with 2-byte elements; None for other strategies
    rule: float | None
    # "states", "sent", "between" or "rule" -> its formula as text, with the unit
    formula: dict[str, str]


def paper_figures(
    parameters: int, trained: int, sharding: ShardingSpec, nodes: int, *, density: float = 1.0, state_numbers: float = 2.0
) -> PaperFigures:
    """Return the papers' figures. The papers do not cover accumulation: a step is one micro-batch.

    States follow section 5 of ZeRO, and traffic section 7. Offloaded states are in host RAM or on disk (ZeRO-Offload,
    arXiv:2101.06840, and ZeRO-Infinity, arXiv:2104.07857). The papers train all parameters; frozen ones are counted here as
    weights without gradients and moments.

    Args:
        trained: number of trained parameters.
        density: stored elements for each parameter; below 1 where frozen weights are packed, which the papers do not cover.
        state_numbers: numbers of optimizer state for each trained parameter.
    """
    mixed = sharding.precision != "no"
    state_ranks = sharding.optimizer_ranks
    stored = formulas.model_states(parameters * density, sharding.stage, state_ranks, mixed=mixed, states=state_numbers)
    updated = formulas.model_states(trained, sharding.stage, state_ranks, mixed=mixed, states=state_numbers)
    states = formulas.States(stored.parameters, updated.gradients, updated.optimizer)
    # If the optimizer is offloaded, so are the gradients.
    gpu_states = 0.0
    if sharding.offload_param == "none":
        gpu_states += states.parameters
    if sharding.offload_optimizer == "none":
        gpu_states += states.gradients + states.optimizer

    # From the same legs, compute the bytes, and write the formula.
    trained_letter = "P" if trained == parameters else "T"
    legs = _list_legs(sharding, trained_letter)
    transfers = []
    for leg in legs:
        elements = parameters * density if leg.letter == "P" else trained
        transfers.append(leg.as_transfer(elements, sharding))
    formula = {
        "states": _states_text(sharding, trained_letter, state_ranks, density, state_numbers),
        "sent": _legs_text(legs, sharding, density),
    }
    rule = None
    if nodes > 1:
        formula["between"] = _legs_text([leg for leg in legs if not leg.within_node], sharding, density, of_node=True)
        if mixed and trained == parameters and sharding.stage == 3 and sharding.shard_ranks == sharding.ranks:
            rule = formulas.between_nodes_rule(parameters, nodes)
            formula["rule"] = f"48 P/{nodes} bits"
    return PaperFigures(
        states=states,
        gpu_states=gpu_states,
        sent=count_sent(transfers),
        between=count_sent_between_nodes(transfers, nodes),
        rule=rule,
        formula=formula,
    )


def _states_text(sharding: ShardingSpec, trained_letter: str, state_ranks: int, density: float, state_numbers: float) -> str:
    """Return the formula of weights, gradients and optimizer state as text, such as ``2 P + 2 P/8 + 12 P/8 bytes``; see
    `formulas.model_states`."""
    per_parameter = formulas.model_states(1, 0, 1, mixed=sharding.precision != "no", states=state_numbers)
    # (bytes of a parameter, letter of the parameters, first stage that shards it, place)
    kinds = (
        (per_parameter.parameters * density, "P", 3, sharding.offload_param),
        (per_parameter.gradients, trained_letter, 2, sharding.offload_optimizer),
        (per_parameter.optimizer, trained_letter, 1, sharding.offload_optimizer),
    )
    places = {"none": "", "cpu": " (host)", "nvme": " (disk)"}
    terms = []
    for kind_bytes, letter, first_stage, place in kinds:
        divisor = f"/{state_ranks}" if sharding.stage >= first_stage and state_ranks > 1 else ""
        terms.append(f"{kind_bytes:g} {letter}{divisor}{places[place]}")
    return f"{' + '.join(terms)} bytes"


@dataclass(frozen=True)
class _Leg:
    """A transfer of a step in the papers' formulas: ``multiple`` x elements / ``divisor`` go around a ring of ``ranks``."""

    content: str
    collective: str
    multiple: float
    # the elements: "P" for all parameters, "T" for the trained ones
    letter: str
    ranks: int
    within_node: bool
    divisor: int = 1

    def rings(self, sharding: ShardingSpec) -> int:
        """Return the number of rings that leave a node at once: for each shard on the node, there is a ring over its copies."""
        return min(self.divisor, sharding.ranks_per_node)

    def as_transfer(self, elements: float, sharding: ShardingSpec) -> Transfer:
        size_bytes = self.multiple * sharding.compute_bytes * elements / self.divisor
        return Transfer(
            self.content,
            self.collective,
            size_bytes,
            self.ranks,
            within_node=self.within_node,
            rings=self.rings(sharding),
        )


def _list_legs(sharding: ShardingSpec, trained_letter: str) -> list[_Leg]:
    """Return the transfers of a step.

    Args:
        trained_letter: "T", or "P" if all parameters are trained.
    """
    on_one_node = sharding.ranks <= sharding.ranks_per_node
    all_reduce = formulas.traffic(0)
    if sharding.stage < 3:
        legs = [_Leg("gradients", "all-reduce", all_reduce, trained_letter, sharding.ranks, on_one_node)]
    else:
        shard_ranks = sharding.shard_ranks
        # Each gather, and the reduce-scatter, are a third of ZeRO-3's traffic. ZeRO++ quantises them, and hpZ gathers for the
        # backward pass inside the node.
        gather = sharding.weight_factor
        backward_ranks = sharding.nearest_copy_ranks
        within_node = shard_ranks <= sharding.ranks_per_node
        backward_within_node = backward_ranks <= sharding.ranks_per_node
        legs = [
            _Leg("weights, forward", "all-gather", gather, "P", shard_ranks, within_node),
            _Leg("weights, backward", "all-gather", gather, "P", backward_ranks, backward_within_node),
            _Leg("gradients", "reduce-scatter", sharding.gradient_factor, trained_letter, shard_ranks, within_node),
            # Hybrid sharding: a rank's shard of the gradients is all-reduced over the copies.
            _Leg(
                "gradients, copies",
                "all-reduce",
                all_reduce,
                trained_letter,
                sharding.ranks // shard_ranks,
                on_one_node,
                divisor=shard_ranks,
            ),
        ]
    # In a ring of one rank, nothing is sent.
    return [leg for leg in legs if leg.ranks > 1]


def _legs_text(legs: list[_Leg], sharding: ShardingSpec, density: float, *, of_node: bool = False) -> str:
    """Return the formula of transfers as text, such as ``3 x 2 P x 7/8 bytes``. Transfers of the same elements around the same
    ring are added.

    Args:
        density: stored elements for each parameter, as in `paper_figures`.
        of_node: count the bytes that leave a node, and not those of one rank. Several equal rings may leave it.
    """
    # (letter with divisor, ranks) -> how many times the elements are sent
    multiples: dict[tuple[str, int], float] = {}
    for leg in legs:
        letter = leg.letter
        if leg.divisor > 1:
            letter += f"/{leg.divisor}"
        rings = leg.rings(sharding) if of_node else 1
        multiples[letter, leg.ranks] = multiples.get((letter, leg.ranks), 0.0) + leg.multiple * rings
    terms = []
    for (letter, ranks), multiple in multiples.items():
        element_bytes = float(sharding.compute_bytes)
        # P counts frozen weights too. If these are packed, a parameter has less than one stored element.
        if letter.startswith("P"):
            element_bytes *= density
        terms.append(f"{multiple:g} x {element_bytes:g} {letter} x {ranks - 1}/{ranks}")
    return f"{' + '.join(terms)} bytes" if terms else "nothing"

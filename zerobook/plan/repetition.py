"""Equal layers of a model, and equal chunks of its loss: a trace runs few of them and counts all.

A trace is recorded as a list of pieces, the operations from one mark to the next. A mark is where a layer begins, where the
gradient of its output is available, or where a chunk begins. Layers may be equal in periods: where sliding and full attention
take turns, a period is two layers. The first three periods and the last one run. If the second and the third period consist of
equal pieces, copies of the third are inserted for all periods that did not run. Otherwise the caller traces the complete model.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, NamedTuple

from torch import nn

from zerobook.plan.gather_schedule import Visit
from zerobook.plan.work import Work

# Periods that run: the first, two that are compared, and the last.
RUN_PERIODS = 4


class Mark(NamedTuple):
    """Start of a part, a layer or a chunk, of the repetition ``name``. ``part`` is its index. With ``backward``, it is the
    start of the part's backward pass."""

    name: str
    part: int
    backward: bool = False


@dataclass
class Piece:
    """The operations of a step from a mark, or the gradient of a weight, until the next mark or gradient."""

    mark: Mark | None = None
    # live bytes at the end, minus those at the start
    live_change: int = 0
    # the most live bytes, minus those at the start
    peak_bytes: int = 0
    # bytes of the storages made in this piece that autograd keeps for the backward pass
    saved_bytes: int = 0
    # bytes that are moved to host memory, and the pinned memory that they take
    host_bytes: int = 0
    pinned_bytes: int = 0
    work: Work = field(default_factory=Work)
    visits: list[Visit] = field(default_factory=list)
    # elements of the weight whose gradient ends the piece; 0 if the end of a pass does, and None if a mark does
    gradient_elements: int | None = None


@dataclass(frozen=True)
class Repetition:
    """Layers or chunks, called parts, that are equal in periods."""

    # the path of the list of layers, or a name for chunks
    name: str
    # index of the first part of the first period
    start: int
    # parts of a period
    period: int
    # all parts
    count: int

    @property
    def skipped(self) -> int:
        """Number of parts that do not run. They are complete periods."""
        periods = (self.count - self.start) // self.period
        return max(periods - RUN_PERIODS, 0) * self.period

    @property
    def resumes(self) -> int:
        """Index of the first part that runs after those that do not run: the first of the last period."""
        return self.start + (RUN_PERIODS - 1) * self.period + self.skipped

    @property
    def indexes_to_run(self) -> list[int]:
        """Indexes of the parts that run."""
        skipped = range(self.resumes - self.skipped, self.resumes)
        return [index for index in range(self.count) if index not in skipped]

    def shift(self, pieces: Iterable[Piece], parts: int, *, first: int = 0) -> list[Piece]:
        """Return copies of pieces that name other parts: in marks and visits, ``parts`` is added to the index of each part that
        is ``first`` or later."""
        shifted = []
        for piece in pieces:
            mark = piece.mark
            if mark is not None and mark.name == self.name and mark.part >= first:
                mark = mark._replace(part=mark.part + parts)
            visits = []
            for visit in piece.visits:
                module = self._shift_name(visit.module, parts, first)
                weight_names = tuple(self._shift_name(name, parts, first) for name in visit.weight_names)
                visits.append(visit._replace(module=module, weight_names=weight_names))
            shifted.append(replace(piece, mark=mark, visits=visits))
        return shifted

    # Add ``parts`` to the layer's index in the name of a module or weight: layers.3.norm becomes layers.7.norm.
    def _shift_name(self, name: str, parts: int, first: int) -> str:
        prefix = f"{self.name}."
        if not name.startswith(prefix):
            return name
        index, dot, rest = name.removeprefix(prefix).partition(".")
        if int(index) < first:
            return name
        return f"{prefix}{int(index) + parts}{dot}{rest}"


def find_repetitions(model: nn.Module) -> list[Repetition]:
    """Return the lists of layers in which enough periods are equal that some need not run."""
    repetitions: list[Repetition] = []
    for path, layers in model.named_modules():
        is_inside = any(path.startswith(f"{other.name}.") for other in repetitions)
        if not isinstance(layers, nn.ModuleList) or len(layers) <= RUN_PERIODS or is_inside:
            continue
        parameters = [parameter for layer in layers for parameter in layer.parameters()]
        # A weight that layers share is gathered and gets its gradient at other moments in each of them.
        if len(parameters) > len(set(parameters)):
            continue
        owner = model.get_submodule(path.rpartition(".")[0])
        repetition = _best_repetition(path, _describe_layers(layers, getattr(owner, "config", None)))
        if repetition.skipped:
            repetitions.append(repetition)
    return repetitions


def _best_repetition(path: str, descriptions: Sequence[Any]) -> Repetition:
    """Return the repetition of a list of layers with the fewest layers that run.

    Args:
        descriptions: of each layer. Layers with equal descriptions are equal.
    """
    count = len(descriptions)
    # Without a repetition, all layers are one period.
    best = Repetition(path, 0, count, count)
    for period in range(1, count // RUN_PERIODS + 1):
        # Extend the repetition from the last period to the front.
        start = count - period
        while start > 0 and descriptions[start - 1] == descriptions[start - 1 + period]:
            start -= 1
        repetition = Repetition(path, start, period, count)
        if repetition.skipped > best.skipped:
            best = repetition
    return best


# Attributes in which layers have their own number.
_INDEXES = {"layer_idx", "layer_id", "layer_index", "layer_number", "block_idx"}


def _describe_layers(layers: nn.ModuleList, config: Any) -> list[Any]:
    """Return for each layer what its operations depend on: its modules, their settings and weights, and the layer's values in
    lists of the config that have one value for each layer."""
    settings_by_layer = []
    for values in vars(config).values() if config is not None else ():
        if isinstance(values, (list, tuple)) and len(values) == len(layers):
            settings_by_layer.append(values)
    descriptions = []
    for index, layer in enumerate(layers):
        description: list[Any] = [str(values[index]) for values in settings_by_layer]
        for name, module in layer.named_modules():
            description.append((name, type(module)))
            for key, value in vars(module).items():
                if isinstance(value, (bool, int, float, str)) and key not in _INDEXES:
                    description.append((key, value))
            for tensors in (module._parameters, module._buffers):
                for key, tensor in tensors.items():
                    if tensor is not None:
                        description.append((key, tensor.shape, tensor.dtype, tensor.requires_grad))
        descriptions.append(description)
    return descriptions


@contextmanager
def keep_few(model: nn.Module, repetitions: Iterable[Repetition]) -> Iterator[None]:
    """Remove the layers that do not run from their lists inside this context.

    The other layers are numbered from 0 on, as an nn.ModuleList requires.
    """
    # (a list of layers, all of its layers by their indexes)
    originals: list[tuple[Any, dict[str, nn.Module | None]]] = []
    try:
        for repetition in repetitions:
            layers: Any = model.get_submodule(repetition.name)
            originals.append((layers, layers._modules))
            layers._modules = {str(number): layers[index] for number, index in enumerate(repetition.indexes_to_run)}
        yield
    finally:
        for layers, all_layers in originals:
            layers._modules = all_layers


class UnequalPartsError(ValueError):
    """Error for parts of a repetition that differ in what they do."""


def extend(pieces: list[Piece], repetitions: Iterable[Repetition]) -> list[Piece]:
    """Return the pieces of all parts, from those of the parts that ran.

    Args:
        pieces: a part's index in them counts only the parts that ran.

    Raises:
        UnequalPartsError: the compared periods differ.
    """
    for repetition in filter(attrgetter("skipped"), repetitions):
        # Give the parts of the last period their indexes among all parts.
        pieces = repetition.shift(pieces, repetition.skipped, first=repetition.resumes - repetition.skipped)
        for backward in (False, True):
            # index of a part -> position of the piece that begins with it
            positions = {}
            for position, piece in enumerate(pieces):
                if piece.mark is not None and (piece.mark.name, piece.mark.backward) == (repetition.name, backward):
                    positions[piece.mark.part] = position
            # Chunks have no backward pass of their own. In an evaluation, layers have none either.
            if backward and not positions:
                continue
            if set(positions) != set(repetition.indexes_to_run):
                raise UnequalPartsError(f"{repetition.name}: not every part begins once")
            pieces = _insert_skipped(pieces, repetition, positions, backward=backward)
    return pieces


def _insert_skipped(pieces: list[Piece], repetition: Repetition, positions: dict[int, int], *, backward: bool) -> list[Piece]:
    """Return all pieces, with copies of the third period in the place of the skipped periods of one pass, forward or backward.

    Args:
        positions: index of a part -> position in ``pieces`` where it begins.

    Raises:
        UnequalPartsError: the second and the third period differ.
    """
    period = repetition.period
    first_of_second = repetition.start + period
    first_of_third = first_of_second + period
    # Copies are made for the parts that come one period after the third, two periods after it, and so on.
    shifts = range(period, repetition.skipped + 1, period)
    if backward:
        # The backward pass runs from the last part to the first: the skipped periods, the third, the second, the first.
        # In this pass, a period begins with its last part, and ends where the last part of the period before it begins.
        third_start = positions[first_of_third + period - 1]
        third_end = positions[first_of_third - 1]
        second = pieces[third_end : positions[first_of_second - 1]]
        insertion = third_start
        shifts = shifts[::-1]
    else:
        third_start = positions[first_of_third]
        third_end = positions[repetition.resumes]
        second = pieces[positions[first_of_second] : third_start]
        insertion = third_end
    third = pieces[third_start:third_end]
    # Equal periods differ in nothing but the names of parts.
    if repetition.shift(second, period) != third:
        raise UnequalPartsError(f"{repetition.name}: the second and the third period differ")
    inserted = []
    for parts in shifts:
        inserted += repetition.shift(third, parts)
    return pieces[:insertion] + inserted + pieces[insertion:]

"""Trace of one micro-batch, its activation memory and its operations: the model itself runs on tensors without contents.

The model is built and run under torch's `FakeTensorMode`: every operation returns tensors of the right shapes, and computes
nothing. So a new architecture needs no formula. A storage is counted from the operation that creates it until Python or
autograd frees it. So the figures include what autograd saves and the copies that autocast and the loss make, and leave out
what activation checkpointing drops.
"""

from __future__ import annotations

import logging
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils.flop_counter import flop_registry
from transformers import masking_utils

from zerobook import head
from zerobook.models import recompute
from zerobook.plan.gather_schedule import Visit
from zerobook.plan.host_ram import pinned_bytes
from zerobook.plan.repetition import Mark, Piece, Repetition, extend
from zerobook.plan.work import Product, Work
from zerobook.utils.dtypes import HALF
from zerobook.utils.replaced import replaced

Loss = Callable[[nn.Module, dict[str, torch.Tensor]], Any]


class TimelinePoint(NamedTuple):
    """A point of a micro-batch at which a pass ends, or a weight gets its gradient."""

    # elements of the weights that had a gradient before this point
    gradient_elements: int
    # the most bytes of activations alive at once since the previous point
    activation_bytes: int


@dataclass
class Trace:
    """Bytes of one micro-batch on one rank, without weights, their gradients and optimizer state."""

    # bytes that autograd keeps between the forward and the backward pass
    saved_bytes: int
    # The first point is the forward pass and the loss; then there is one for each weight that gets a gradient.
    timeline: list[TimelinePoint]
    # operations of the device
    work: Work = field(default_factory=Work)
    # the modules in the order in which they run, forward and then backward
    visits: Sequence[Visit] = ()
    # operations that multiply matrices, but whose number of floating-point operations is unknown
    uncounted: tuple[str, ...] = ()
    # the most bytes alive at once in a forward pass of the evaluation and its loss; None if nothing is evaluated
    evaluation_bytes: int | None = None
    # bytes that are moved to host memory between the passes, and the pinned memory that they take
    host_bytes: int = 0
    pinned_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        return max(point.activation_bytes for point in self.timeline)


def _attention_flops(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Any, causal: bool) -> float:
    """Return the floating-point operations of attention: two products, of queries by keys and of scores by values. A causal
    kernel leaves out the half of the scores that is masked."""
    return 4.0 * q.numel() * k.shape[-2] / (2 if causal else 1)


_MATRIX_PRODUCT = re.compile(r"mm(_|$)|matmul|gemm")


# Product of matrices -> the positions of its factors among the arguments.
_FACTORS = {
    "aten::mm": (0, 1),
    "aten::addmm": (1, 2),
    "aten::addmm_": (1, 2),
    "aten::bmm": (0, 1),
    "aten::baddbmm": (1, 2),
    "aten::_grouped_mm": (0, 1),
    # operations of transformers for where torch has no kernel: a loop over the groups
    "transformers::grouped_mm_fallback": (0, 1),
    "transformers::grouped_mm_fallback_backward": (0, 1),
}
_LOOK_UPS = {"aten::embedding", "aten::index", "aten::index_select", "aten::gather"}
_WITHOUT_KERNEL = {
    "aten::_unsafe_view",
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::new_empty_strided",
    "prim::device",
}


def _is_view(func: Any) -> bool:
    """Return whether an operation only returns another view of its input."""
    returns = func._schema.returns
    return bool(returns) and all(value.alias_info is not None and not value.alias_info.is_write for value in returns)


def _tensor_bytes(values: Any) -> float:
    """Return the bytes of all tensors in ``values``. An expanded tensor is read from its smaller storage."""
    total = 0
    for tensor in tree_iter(values):
        if isinstance(tensor, torch.Tensor):
            total += min(tensor.nbytes, tensor.untyped_storage().nbytes())
    return float(total)


class StorageCounter(TorchDispatchMode):
    """Counter of the live bytes of storages that operations make inside this mode, and of floating-point operations.

    It counts operations itself, because torch's FlopCounterMode would keep every tensor alive until the next garbage
    collection.

    Args:
        skips_chunks: run few of the loss's chunks, see `zerobook.plan.repetition`.
    """

    def __init__(self, *, skips_chunks: bool = False) -> None:
        super().__init__()
        self.skips_chunks = skips_chunks
        # hooks of the model, which the caller removes after the passes
        self.hooks: list[Any] = []
        # the chunks of each call of the loss, of which few ran
        self.chunks: list[Repetition] = []
        self.live_bytes = 0
        # the most live bytes at once since the present piece began
        self.peak_bytes = 0
        # The last piece is the present one.
        self.pieces = [Piece()]
        # names of matrix products whose number of floating-point operations is unknown
        self.uncounted: set[str] = set()
        self._piece_start_bytes = 0
        self._marks: set[Mark] = set()
        # address of a live storage -> a reference to it, and the piece that made it
        self._counted: dict[int, tuple[weakref.ref, Piece]] = {}
        # addresses of storages that do not count, such as those of weights
        self._excluded: set[int] = set()

    # operations of the present piece
    @property
    def work(self) -> Work:
        return self.pieces[-1].work

    def begin_part(self, mark: Mark) -> None:
        """Begin a piece at a mark. Activation checkpointing runs a layer twice, and only the first time begins a piece."""
        if mark not in self._marks:
            self._marks.add(mark)
            self.end_piece()
            self.pieces[-1].mark = mark

    def end_piece(self, gradient_elements: int | None = None) -> None:
        """End the present piece, and begin another."""
        piece = self.pieces[-1]
        piece.gradient_elements = gradient_elements
        piece.live_change = self.live_bytes - self._piece_start_bytes
        piece.peak_bytes = self.peak_bytes - self._piece_start_bytes
        self._piece_start_bytes = self.live_bytes
        self.peak_bytes = self.live_bytes
        self.pieces.append(Piece())

    def run_few_chunks(self, positions: int, chunk_length: int) -> Iterator[int]:
        """Yield the first positions of few of the loss's chunks. This replaces `zerobook.head.chunk_starts`."""
        starts = range(0, positions, chunk_length)
        chunks = Repetition(f"chunks {len(self.chunks)}", 0, 1, len(starts))
        self.chunks.append(chunks)
        for number, index in enumerate(chunks.indexes_to_run):
            self.begin_part(Mark(chunks.name, number))
            yield starts[index]

    def count_saved(self, storage_bytes: dict[int, int]) -> None:
        """Add the bytes of saved storages to the pieces that made them.

        Args:
            storage_bytes: `SavedTensors.storage_bytes`.
        """
        for key, size in storage_bytes.items():
            # Storages that were made before this mode began belong to the first piece.
            _, piece = self._counted.get(key, (None, self.pieces[0]))
            piece.saved_bytes += size

    def exclude(self, tensor: torch.Tensor) -> None:
        """Stop counting ``tensor``'s storage."""
        storage = tensor.untyped_storage()
        self._forget(storage._cdata, storage.nbytes())
        self._excluded.add(storage._cdata)

    def count(self, tensor: torch.Tensor) -> None:
        """Count ``tensor``'s storage, once, for as long as it lives."""
        storage = tensor.untyped_storage()
        # The key is the address of torch's C++ storage: each call of untyped_storage makes another Python object.
        key = storage._cdata
        size = storage.nbytes()
        if key in self._excluded or key in self._counted or not size:
            return
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        # The reference calls the function when the storage is freed.
        reference = weakref.ref(storage, lambda _: self._forget(key, size))
        self._counted[key] = (reference, self.pieces[-1])

    def _forget(self, key: int, size: int) -> None:
        if self._counted.pop(key, None) is not None:
            self.live_bytes -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name == "aten::_grouped_mm":
            result: Any = _run_grouped_product(func, *args, **kwargs)
        elif name == "aten::_local_scalar_dense" and args[0].dtype == torch.bool and isinstance(args[0], FakeTensor):
            # A fake tensor has no value to read. Before 5.23, models such as BART read a random one in each layer, which is
            # skipped if it is true (transformers' LayerDrop). Every layer is counted.
            result = False
        elif func is torch.ops.aten.addmm.dtype_out and isinstance(kwargs["out"], FakeTensor):
            # The shape rule of torch 2.11 fails here, since it reads the dtype of the result as a factor.
            result = kwargs["out"]
        else:
            result = func(*args, **kwargs)
        self._record(func, name, args, result)
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                self.count(tensor)
        return result

    def _record(self, func: Any, name: str, args: Any, result: Any) -> None:
        """Add an operation to the counts of the current `Piece`, a section of the step."""
        if name in _WITHOUT_KERNEL or _is_view(func):
            return
        work = self.work
        work.kernels += 1
        if name == "zerobook::dequantise":
            work.dequantised_elements += result.numel()
            return
        if name == "zerobook::attention":
            q, k, v, bias, causal = args
            work.attention[q.shape[-2], _attention_flops(q, k, v, bias, causal)] += 1
            return
        factors = _FACTORS.get(name)
        if factors is not None:
            a, b = (args[index] for index in factors)
            # The first of three dimensions is a batch if both have it. In a mixture of experts, only ``b`` has it: a matrix for
            # each group of ``a``'s rows. Each row is multiplied by one of them, so the batch is 1.
            batch = a.shape[0] if a.ndim == b.ndim == 3 else 1
            product = Product(batch, a.shape[-2], a.shape[-1], b.shape[-1], a.element_size())
            # The backward pass makes the gradients of both factors.
            work.products[product] += 2 if name.endswith("_backward") else 1
            return
        if _MATRIX_PRODUCT.search(name) or func._overloadpacket in flop_registry:
            self.uncounted.add(name)
        results = _tensor_bytes(result)
        # A look-up reads as much as it writes, whatever the size of its table.
        work.moved_bytes += 2 * results if name in _LOOK_UPS else _tensor_bytes(args) + results


def _run_grouped_product(func: Any, a: torch.Tensor, b: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Run a grouped product, also on fake tensors that are not bf16.

    The shape rule of torch 2.13 accepts only bf16. Its kernels for CUDA and CPU also accept fp32 and fp16, and return the dtype
    of their input (aten/src/ATen/native/GroupedMMUtils.h). autocast does not cast these inputs, so experts with fp32 weights
    run in fp32.
    """
    if not isinstance(a, FakeTensor) or a.dtype == b.dtype == torch.bfloat16:
        return func(a, b, *args, **kwargs)
    if a.dtype != b.dtype:
        raise ValueError(f"a grouped product of {a.dtype} by {b.dtype}, which no device can compute")
    a_bf16 = torch.empty_like(a, dtype=torch.bfloat16)
    b_bf16 = torch.empty_like(b, dtype=torch.bfloat16)
    return torch.empty_like(func(a_bf16, b_bf16, *args, **kwargs), dtype=a.dtype)


class SavedTensors:
    """Counter of the bytes of the distinct storages that autograd saves inside this context, and of the results that
    selective checkpointing keeps.

    Args:
        excluded: returns tensors that do not count, mainly weights. It is called for each saved tensor, since sharded
            weights have other storages while they are gathered.
    """

    def __init__(self, excluded: Callable[[], Iterable[torch.Tensor]]):
        self._excluded = excluded
        # address of a storage -> its bytes; empty until the context ends
        self.storage_bytes: dict[int, int] = {}
        # References keep the storages alive, so that no other storage gets the address of one.
        self._storages: dict[int, torch.UntypedStorage] = {}

    def __enter__(self) -> SavedTensors:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._hooks.__exit__(*exception)
        for tensor in recompute.iterate_saved_tensors():
            self._pack(tensor)
        self.storage_bytes = {key: storage.nbytes() for key, storage in self._storages.items()}
        # Autograd still refers to the hooks. Without references here, the backward pass frees storages one after the other.
        self._storages.clear()

    @property
    def bytes(self) -> int:
        return sum(self.storage_bytes.values())

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        excluded = {other.untyped_storage()._cdata for other in self._excluded()}
        if storage._cdata not in excluded:
            self._storages[storage._cdata] = storage
        return tensor


def trace_step(
    model: nn.Module,
    batch: dict[str, torch.Tensor],
    loss: Loss,
    precision: str,
    *,
    device: str | None = None,
    repetitions: Sequence[Repetition] | None = None,
) -> Trace:
    """Run one micro-batch forward and backward. Call inside the fake mode that made ``model`` and ``batch``.

    Args:
        batch: the collator's output, with ``labels``.
        loss: an objective's loss, see `zerobook.objective.Objective.loss`.
        precision: the precision of autocast: ``no``, ``bf16`` or ``fp16``.
        device: the device whose kernels are simulated, as `Cluster.kernels` names it; None for real tensors, on which real
            kernels run.
        repetitions: equal layers, of which ``model`` has few; the trace counts all. None if ``model`` has all.

    Raises:
        UnequalPartsError: layers of a repetition differ in what they do.
    """

    # `zerobook.plan.memory` adds gradients as each strategy shards them. In the trace they must not be alive.
    def free_gradient(counter: StorageCounter, parameter: torch.Tensor) -> None:
        counter.end_piece(parameter.numel())
        parameter.grad = None

    def run_step(counter: StorageCounter) -> None:
        for parameter in model.parameters():
            if parameter.requires_grad:
                counter.hooks.append(parameter.register_post_accumulate_grad_hook(partial(free_gradient, counter)))
        excluded = [*model.parameters(), *model.buffers(), *batch.values()]
        with SavedTensors(lambda: excluded) as saved:
            value = loss(model, batch)
        counter.count_saved(saved.storage_bytes)
        # An objective may return metrics beside the loss.
        if isinstance(value, tuple):
            value = value[0]
        counter.end_piece(gradient_elements=0)
        value.backward()

    return _trace(run_step, model, batch, precision, device, repetitions)


@torch.no_grad()
def trace_evaluation(
    model: nn.Module,
    batch: dict[str, torch.Tensor],
    loss: Loss,
    precision: str,
    *,
    device: str | None = None,
    repetitions: Sequence[Repetition] | None = None,
) -> int:
    """Return the most bytes of activations alive at once in an evaluation's forward pass and loss.

    The arguments are those of `trace_step`.
    """

    def evaluate(counter: StorageCounter) -> None:
        # Under autocast, accelerate converts the logits to fp32.
        loss(model if precision == "no" else _Upcast(model), batch)

    model.eval()
    try:
        return _trace(evaluate, model, batch, precision, device, repetitions).peak_bytes
    finally:
        model.train()


def _trace(
    run_passes: Callable[[StorageCounter], None],
    model: nn.Module,
    batch: dict[str, torch.Tensor],
    precision: str,
    device: str | None,
    repetitions: Sequence[Repetition] | None,
) -> Trace:
    """Run passes on tensors without contents, and return the trace of the complete model.

    Args:
        run_passes: runs the passes, and calls `StorageCounter.end_piece` where a piece ends.
        repetitions: equal layers of which ``model`` has few; None if it has all.
    """
    # If the model has all of its layers, the loss has all of its chunks too.
    counter = StorageCounter(skips_chunks=repetitions is not None)
    try:
        _record_visits(model, counter, repetitions or ())
        with _simulate(counter, model, batch, precision, device):
            run_passes(counter)
    finally:
        for hook in counter.hooks:
            hook.remove()
    # The last piece ends with the passes.
    counter.end_piece(gradient_elements=0)
    pieces = counter.pieces
    # Add the pieces of the layers and of the chunks of the loss that did not run.
    if repetitions is not None:
        pieces = extend(pieces, [*repetitions, *counter.chunks])
    return _join(pieces, counter.uncounted)


def _join(pieces: Iterable[Piece], uncounted: Iterable[str]) -> Trace:
    """Return the trace that consists of ``pieces``."""
    trace = Trace(0, [], uncounted=tuple(sorted(uncounted)))
    visits = []
    # ``peak_bytes`` is the most since the last point of the timeline.
    live_bytes = peak_bytes = gradient_elements = 0
    for piece in pieces:
        trace.saved_bytes += piece.saved_bytes
        trace.host_bytes += piece.host_bytes
        trace.pinned_bytes += piece.pinned_bytes
        trace.work.add(piece.work)
        visits += piece.visits
        peak_bytes = max(peak_bytes, live_bytes + piece.peak_bytes)
        live_bytes += piece.live_change
        # The piece ends with a pass or with a gradient.
        if piece.gradient_elements is not None:
            trace.timeline.append(TimelinePoint(gradient_elements, peak_bytes))
            gradient_elements += piece.gradient_elements
            peak_bytes = live_bytes
    trace.visits = visits
    return trace


def _refuse_outputs_of_layers(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Raise `ValueError` if the loss uses an output of each layer. Its work then grows with the number of layers, so all of
    them have to run."""
    config = getattr(module, "config", None)
    for name in ("output_hidden_states", "output_attentions", "output_router_logits"):
        if kwargs.get(name) or getattr(config, name, False):
            raise ValueError(f"{name} is set")


class _Upcast(nn.Module):
    """Wrapper that returns logits in fp32, as accelerate does for a model under autocast."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, **inputs: Any) -> Any:
        output = self.module(**inputs)
        output.logits = output.logits.float()
        return output


@contextmanager
def _simulate(
    counter: StorageCounter, model: nn.Module, batch: dict[str, torch.Tensor], precision: str, device: str | None
) -> Iterator[None]:
    """Count the operations inside this context, and simulate those of ``device`` with autocast to ``precision``. ``batch``
    counts as activations; weights do not."""
    for tensor in [*model.parameters(), *model.buffers()]:
        counter.exclude(tensor)
    with ExitStack() as stack:
        if device is not None:
            stack.enter_context(_simulate_attention(device, counter))
        if device not in (None, "cpu"):
            stack.enter_context(_simulate_cuda(precision != "no", counter))
        if "position_ids" not in batch:
            # transformers reads the values of position ids to find packed rows. For fake tensors, it would assume a mask.
            stack.enter_context(replaced(masking_utils, "find_packed_sequence_indices", lambda *_, **__: None))
        if counter.skips_chunks:
            stack.enter_context(replaced(head, "chunk_starts", counter.run_few_chunks))
        # torch prints tracebacks for an operation without a shape rule. The caller reports the error.
        stack.enter_context(replaced(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True))
        stack.enter_context(counter)
        # Fake tensors are on the CPU, whatever device is simulated.
        device_type = next(model.parameters()).device.type
        stack.enter_context(torch.autocast(device_type, HALF.get(precision), enabled=precision != "no"))
        for tensor in batch.values():
            counter.count(tensor)
        yield


class _CallInBackward(torch.autograd.Function):
    """Identity that calls ``function`` in the backward pass."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, function: Callable[[], None]) -> torch.Tensor:
        ctx.function = function
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.function()
        return grad, None


class _VisitRecorder:
    """Hooks of one module that record its visits where DeepSpeed's hooks are called: before and after its forward pass, at the
    gradient of each output, and when all inputs have their gradients."""

    def __init__(self, visit: Visit, counter: StorageCounter, mark: Mark | None):
        self._visit = visit
        self._counter = counter
        # the mark of the module, if it is a layer of a repetition
        self._mark = mark
        # inputs that have no gradient yet
        self._pending_inputs = 0

    def before_forward(self, module: nn.Module, inputs: Any) -> Any:
        self._record(self._mark)
        self._pending_inputs = 0

        def watch(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.requires_grad:
                return tensor
            self._pending_inputs += 1
            return _CallInBackward.apply(tensor, self._record_input_gradient)

        return tree_map_only(torch.Tensor, watch, inputs)

    def after_forward(self, module: nn.Module, inputs: Any, outputs: Any) -> Any:
        self._record(end=True)

        def watch(tensor: torch.Tensor) -> torch.Tensor:
            return _CallInBackward.apply(tensor, self._record_output_gradient) if tensor.requires_grad else tensor

        return tree_map_only(torch.Tensor, watch, outputs)

    def _record(self, mark: Mark | None = None, *, backward: bool = False, end: bool = False) -> None:
        if mark is not None:
            self._counter.begin_part(mark)
        self._counter.pieces[-1].visits.append(self._visit._replace(backward=backward, end=end))

    def _record_output_gradient(self) -> None:
        mark = None if self._mark is None else self._mark._replace(backward=True)
        self._record(mark, backward=True)

    def _record_input_gradient(self) -> None:
        self._pending_inputs -= 1
        if not self._pending_inputs:
            self._record(backward=True, end=True)


def _record_visits(model: nn.Module, counter: StorageCounter, repetitions: Sequence[Repetition]) -> None:
    """Register hooks that add the visits of all modules to ``counter``."""
    # path of a layer that runs -> its mark
    marks = {}
    for repetition in repetitions:
        for index in range(len(repetition.indexes_to_run)):
            marks[f"{repetition.name}.{index}"] = Mark(repetition.name, index)
    if counter.skips_chunks:
        counter.hooks.append(model.register_forward_pre_hook(_refuse_outputs_of_layers, with_kwargs=True))
    # A weight that modules share has one name.
    names = {parameter: name for name, parameter in model.named_parameters()}
    for path, module in model.named_modules():
        weight_names = [names[parameter] for parameter in module.parameters(recurse=False)]
        recorder = _VisitRecorder(Visit(path, tuple(dict.fromkeys(weight_names))), counter, marks.get(path))
        counter.hooks.append(module.register_forward_pre_hook(recorder.before_forward))
        counter.hooks.append(module.register_forward_hook(recorder.after_forward))


@torch.library.custom_op("zerobook::attention", mutates_args=())
def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention by a kernel that stores no matrix of scores. Return its result, and the logarithm of the sum of each
    row of scores."""
    raise NotImplementedError("it has shapes and no contents")


@_attention.register_fake
def _make_attention_results(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, heads, length, _ = q.shape
    # Kernels write [rows, length, heads, width], the layout that the next layer reads.
    out = q.new_empty(rows, length, heads, v.shape[-1]).transpose(1, 2)
    return out, q.new_empty(q.shape[:-1], dtype=torch.float32)


class _Attention(torch.autograd.Function):
    """Attention that saves tensors of the shapes that its kernel saves."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: torch.Tensor | None,
        counter: StorageCounter,
        causal: bool,
    ) -> torch.Tensor:
        out, sums = _attention(q, k, v, bias, causal)
        ctx.counter = counter
        ctx.flops = _attention_flops(q, k, v, bias, causal)
        ctx.save_for_backward(q, k, v, bias, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, bias, *_ = ctx.saved_tensors
        # The scores are recomputed, and four products give the gradients: 5 products where the forward pass has 2.
        ctx.counter.work.attention[q.shape[-2], 2.5 * ctx.flops] += 1
        bias_grad = torch.empty_like(bias) if bias is not None and ctx.needs_input_grad[3] else None
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), bias_grad, None, None


@contextmanager
def _simulate_attention(device: str, counter: StorageCounter) -> Iterator[None]:
    """Replace attention by an operation that allocates what the fused kernels of ``device`` allocate.

    On fake tensors, torch always uses its plain implementation, which stores the scores. A device uses it only for unusual
    shapes and options. The conditions are those of torch 2.13, aten/src/ATen/native/transformers/sdp_utils_cpp.h and
    cuda/sdp_utils.cpp.
    """
    plain_attention = F.scaled_dot_product_attention

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        # The kernels take [batch, heads, tokens, width]. With enable_gqa, keys and values may have fewer heads.
        has_equal_heads = query.ndim == 4 and query.shape[:2] == key.shape[:2] == value.shape[:2]
        if not has_equal_heads and not options.get("enable_gqa"):
            return plain_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
        mask_has_gradient = attn_mask is not None and attn_mask.requires_grad
        if device == "cpu" and (dropout_p > 0 or mask_has_gradient):
            return plain_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
        # The fake tensors are on the CPU, whatever device is simulated, so autocast is enabled for the CPU.
        if torch.is_autocast_enabled(query.device.type):
            dtype = torch.get_autocast_dtype(query.device.type)
            query = query.to(dtype)
            key = key.to(dtype)
            value = value.to(dtype)
            if attn_mask is not None and attn_mask.is_floating_point():
                attn_mask = attn_mask.to(dtype)
        # `zerobook.utils.attention.attend_fused` repeats shared keys for kernels other than flash attention.
        if not has_equal_heads and device != "cpu" and not (device == "cuda" and query.dtype in HALF.values()):
            groups = query.shape[1] // key.shape[1]
            key = key.repeat_interleave(groups, dim=1)
            value = value.repeat_interleave(groups, dim=1)
        # torch turns a boolean mask into one that is added to the scores, in the dtype of the query.
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.empty_like(attn_mask, dtype=query.dtype)
        return _Attention.apply(query, key, value, attn_mask, counter, is_causal)

    with replaced(F, "scaled_dot_product_attention", attend):
        yield


_TENSOR_OPERATIONS_IN_FP32 = ("softmax", "log_softmax", "pow", "rsqrt", "exp", "log", "cumsum", "sum", "norm", "reciprocal")
# Operations that autocast runs in fp32 on CUDA and not on the CPU (torch 2.13, aten/src/ATen/autocast_mode.h).
_OPERATIONS_IN_FP32 = {
    F: ("layer_norm", "group_norm", "softmax", "log_softmax", "cross_entropy", "nll_loss", "mse_loss", "softplus"),
    torch: ("layer_norm", *_TENSOR_OPERATIONS_IN_FP32),
    torch.Tensor: ("__pow__", "__rpow__", *_TENSOR_OPERATIONS_IN_FP32),
}


@contextmanager
def _simulate_cuda(autocasts: bool, counter: StorageCounter) -> Iterator[None]:
    """Simulate CUDA where it differs from the CPU, on whose fake tensors a trace runs.

    autocast runs the operations listed above in fp32. A fused dropout saves a mask of one byte for each element. Activations
    are moved to host memory.

    Args:
        autocasts: autocast is enabled.
    """

    def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        if not training or p <= 0:
            return input
        return torch.native_dropout(input, p, True)[0]

    def run_in_fp32(operation: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: operation(*tree_map_only(torch.Tensor, _to_fp32, args), **kwargs)

    # The tensor is freed, since only its description is kept.
    def move_to_host(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
        counter.pieces[-1].host_bytes += tensor.nbytes
        counter.pieces[-1].pinned_bytes += pinned_bytes(tensor.nbytes)
        return tensor.shape, tensor.dtype

    def move_back(description: tuple[torch.Size, torch.dtype]) -> torch.Tensor:
        shape, dtype = description
        return torch.empty(shape, dtype=dtype)

    def save_on_cpu(pin_memory: bool) -> torch.autograd.graph.saved_tensors_hooks:
        return torch.autograd.graph.saved_tensors_hooks(move_to_host, move_back)

    def has_fp32_products(tensor: torch.Tensor) -> bool:
        return tensor.dtype in (torch.float16, torch.bfloat16)

    with ExitStack() as stack:
        stack.enter_context(replaced(F, "dropout", dropout))
        stack.enter_context(replaced(head, "has_fp32_products", has_fp32_products))
        stack.enter_context(replaced(recompute, "save_on_cpu", save_on_cpu))
        if autocasts:
            for owner, names in _OPERATIONS_IN_FP32.items():
                for name in names:
                    stack.enter_context(replaced(owner, name, run_in_fp32(getattr(owner, name))))
        yield


def _to_fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor

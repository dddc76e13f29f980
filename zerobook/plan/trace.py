"""Activation memory of one micro-batch, found by running the model itself on tensors without contents.

The model is built and run under `FakeTensorMode`: every operation reports the shapes of its results, and nothing is
computed, so a new architecture needs no formula. Storages are followed from the operation that makes them until Python or
autograd frees them. The figures therefore show what a step really keeps: they contain what autograd saves and the copies
that autocast and the loss make, and not what checkpointing drops.
"""

from __future__ import annotations

import logging
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils.flop_counter import flop_registry

from zerobook.models import recompute
from zerobook.plan.gather_schedule import Visit
from zerobook.utils.dtypes import HALF

Loss = Callable[[nn.Module, dict[str, torch.Tensor]], Any]


@dataclass
class Trace:
    """Bytes of one micro-batch on one rank, without weights, their gradients and optimizer state.

    ``saved`` is what autograd keeps between the forward and the backward pass; ``inputs`` is the batch itself. ``timeline``
    has a point for each weight that gets a gradient: (elements of gradients before it, the most bytes of activations alive
    since the previous point). Its first point is the forward pass and the loss. ``visits`` are the modules in the order in
    which they run, forward and then backward. ``uncounted`` names operations that multiply matrices but are missing from
    ``flops``, since their number of operations is unknown. ``evaluation`` is the most bytes alive at once in a forward pass
    of the evaluation and its loss; None where nothing is evaluated. ``host`` is what lies in host memory between the passes.
    """

    saved: int
    inputs: int
    forward_peak: int
    timeline: list[tuple[int, int]] = field(default_factory=list)
    flops: float = 0.0
    visits: Sequence[Visit] = ()
    uncounted: tuple[str, ...] = ()
    evaluation: int | None = None
    host: int = 0

    @property
    def peak(self) -> int:
        return max(most for _, most in self.timeline)


def _grouped(a: torch.Tensor, b: torch.Tensor, *_: Any, **__: Any) -> float:
    """Return the operations of a grouped product, as for a mixture's experts: each row of ``a`` is multiplied by one of
    ``b``'s matrices, whatever their number. Where both are matrices, their common dimension is divided into groups."""
    groups = a.shape[0] if a.ndim == b.ndim == 3 else 1
    return 2.0 * groups * a.shape[-2] * a.shape[-1] * b.shape[-1]


_LAWS: dict[str, Callable[..., float]] = {
    "aten::_grouped_mm": _grouped,
    "aten::addmm_": lambda total, a, b, *_, **__: 2.0 * a.shape[0] * a.shape[1] * b.shape[1],
    # transformers' own, where torch has no kernel: a loop over the groups
    "transformers::grouped_mm_fallback": _grouped,
    "transformers::grouped_mm_fallback_backward": lambda a, b, *_: 2 * _grouped(a, b),
}
"""Operations that torch 2.13's flop counter does not know -> their number of floating-point operations."""
_PRODUCT = re.compile(r"mm(_|$)|matmul|gemm")


class Follow(TorchDispatchMode):
    """Counter of the live bytes of storages that operations make inside this mode, and of floating-point operations.

    It counts operations itself, because torch's FlopCounterMode would keep every tensor alive until the next garbage
    collection.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.most = 0
        self.flops = 0.0
        self.host = 0
        self.uncounted: set[str] = set()
        self._known: dict[int, weakref.ref] = {}
        self._apart: set[int] = set()  # storages that do not count, such as those of weights

    def leave_out(self, tensor: torch.Tensor) -> None:
        """Stop counting ``tensor``'s storage."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            self._forget(key, storage.nbytes())
        self._apart.add(key)

    def count(self, tensor: torch.Tensor) -> None:
        """Count ``tensor``'s storage, once, for as long as it lives."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._apart or key in self._known or not size:
            return
        self.live += size
        self.most = max(self.most, self.live)
        self._known[key] = weakref.ref(storage, lambda _: self._forget(key, size))

    def since(self) -> int:
        """Return the most bytes alive at once since the last call."""
        most, self.most = self.most, self.live
        return most

    def _forget(self, key: int, size: int) -> None:
        if self._known.pop(key, None) is not None:
            self.live -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        result = _in_groups(func, *args, **kwargs) if name == "aten::_grouped_mm" else func(*args, **kwargs)
        law = flop_registry.get(func._overloadpacket)
        if law is not None:
            self.flops += law(*args, **kwargs, out_val=result)
        elif name in _LAWS:
            self.flops += _LAWS[name](*args, **kwargs)
        elif _PRODUCT.search(name):
            self.uncounted.add(name)
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                self.count(tensor)
        return result


def _in_groups(func: Any, a: torch.Tensor, b: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Run a grouped product, also on fake tensors that are not bf16. torch's shape rule for these knows only bf16; its
    kernels for CUDA and CPU also accept fp32 and fp16, and return the dtype of their input
    (aten/src/ATen/native/GroupedMMUtils.h). autocast does not change these dtypes, so the experts of fp32 weights run in
    fp32."""
    if not isinstance(a, FakeTensor) or a.dtype == b.dtype == torch.bfloat16:
        return func(a, b, *args, **kwargs)
    if a.dtype != b.dtype:
        raise ValueError(f"a product in groups of {a.dtype} by {b.dtype}, which no device takes")
    alike = (torch.empty_like(tensor, dtype=torch.bfloat16) for tensor in (a, b))
    return torch.empty_like(func(*alike, *args, **kwargs), dtype=a.dtype)


class Saved:
    """Counter of the bytes of the distinct storages that autograd saves inside this context, and of the results that
    selective checkpointing keeps.

    Args:
        apart: returns tensors that do not count, mainly weights. It is called for each saved tensor, since sharded weights
            have other storages while they are gathered.
    """

    def __init__(self, apart: Callable[[], Iterable[torch.Tensor]]):
        self._apart = apart
        self.bytes = 0
        self._storages: dict[int, torch.UntypedStorage] = {}  # kept alive, so that no key is used twice

    def __enter__(self) -> Saved:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept)
        self._hooks.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._hooks.__exit__(*raised)
        for tensor in recompute.saved_tensors():
            self._pack(tensor)
        self.bytes = sum(storage.nbytes() for storage in self._storages.values())
        self._storages.clear()  # autograd still refers to the hooks; the backward pass frees storages one after the other

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in {t.untyped_storage()._cdata for t in self._apart()}:
            self._storages[storage._cdata] = storage
        return tensor


def trace(
    model: nn.Module,
    batch: dict[str, torch.Tensor],
    loss: Loss,
    precision: str,
    *,
    kernels: str | None = None,
) -> Trace:
    """Run one micro-batch forward and backward. Call inside the fake mode that made ``model`` and ``batch``.

    Args:
        batch: the collator's output, with ``labels``.
        loss: an objective's loss, see `zerobook.objective.Objective.loss`.
        precision: the precision of autocast: ``no``, ``bf16`` or ``fp16``.
        kernels: the device, ``cpu`` or ``cuda``, whose attention is simulated; None for real tensors, which run their own.
    """
    follow, done = Follow(), 0
    points: list[tuple[int, int]] = []
    apart = [*model.parameters(), *model.buffers(), *batch.values()]

    def accumulated(parameter: torch.Tensor) -> None:
        nonlocal done
        points.append((done, follow.since()))
        done += parameter.numel()
        parameter.grad = None

    visits: list[Visit] = []
    hooks = [p.register_post_accumulate_grad_hook(accumulated) for p in model.parameters() if p.requires_grad]
    hooks += _visited(model, visits)
    try:
        with _followed(follow, model, batch, precision, kernels):
            inputs = follow.live
            with Saved(lambda: apart) as saved:
                value = loss(model, batch)
                value = value[0] if isinstance(value, tuple) else value
            points.append((0, forward := follow.since()))
            value.backward()
            points.append((done, follow.since()))
    finally:
        for hook in hooks:
            hook.remove()
    return Trace(saved.bytes, inputs, forward, points, follow.flops, visits, tuple(sorted(follow.uncounted)), host=follow.host)


@torch.no_grad()
def evaluated(
    model: nn.Module,
    batch: dict[str, torch.Tensor],
    loss: Loss,
    precision: str,
    *,
    kernels: str | None = None,
) -> int:
    """Return the most bytes alive at once in an evaluation's forward pass and loss, weights left out. The arguments are those
    of `trace`."""
    follow, was_training = Follow(), model.training
    model.eval()
    try:
        with _followed(follow, model, batch, precision, kernels):
            loss(model if precision == "no" else _Upcast(model), batch)
            return follow.since()
    finally:
        model.train(was_training)


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
def _followed(
    follow: Follow, model: nn.Module, batch: dict[str, torch.Tensor], precision: str, kernels: str | None
) -> Iterator[None]:
    """Run a micro-batch's operations inside as the device and ``precision`` would; ``follow`` counts ``batch`` and their
    results."""
    for tensor in [*model.parameters(), *model.buffers()]:
        follow.leave_out(tensor)
    with (
        _kernels(kernels, follow) if kernels else nullcontext(),
        _cuda(precision != "no", follow) if kernels == "cuda" else nullcontext(),
        _unpacked("position_ids" not in batch),
        _unsaid(),
        follow,
        _autocast(next(model.parameters()).device.type, HALF.get(precision)),
    ):
        for tensor in batch.values():
            follow.count(tensor)
        yield


class _Back(torch.autograd.Function):
    """Identity that calls ``said`` in the backward pass."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, said: Callable[[], None]) -> torch.Tensor:
        ctx.said = said
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.said()
        return grad, None


def _visited(model: nn.Module, visits: list[Visit]) -> list[Any]:
    """Return hooks that record the visits as DeepSpeed's hooks do: in the backward pass, at each output and after all
    inputs."""
    names = {parameter: name for name, parameter in model.named_parameters()}  # a shared weight has one name

    def by(said: Callable[[], None], tensors: Any) -> Any:
        return tree_map_only(torch.Tensor, lambda t: _Back.apply(t, said) if t.requires_grad else t, tensors)

    def hooks(path: str, module: nn.Module) -> Iterator[Any]:
        here = Visit(path, tuple(dict.fromkeys(names[p] for p in module.parameters(recurse=False))))
        waiting = 0

        def coming(_: nn.Module, given: Any) -> Any:
            nonlocal waiting
            visits.append(here)
            waiting = sum(isinstance(t, torch.Tensor) and t.requires_grad for t in tree_iter(given))
            return by(left, given)

        def gone(_: nn.Module, __: Any, output: Any) -> Any:
            visits.append(here._replace(end=True))
            return by(lambda: visits.append(here._replace(back=True)), output)

        def left() -> None:
            nonlocal waiting
            waiting -= 1
            if not waiting:
                visits.append(here._replace(back=True, end=True))

        yield module.register_forward_pre_hook(coming)
        yield module.register_forward_hook(gone)

    return [hook for path, module in model.named_modules() for hook in hooks(path, module)]


@torch.library.custom_op("zerobook::attention", mutates_args=())
def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention by a kernel that stores no matrix of scores: (its result, the logarithm of each row's sum)."""
    raise NotImplementedError("it has shapes and no contents")


@_attention.register_fake
def _shapes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, heads, length, _ = q.shape
    out = q.new_empty(rows, length, heads, v.shape[-1]).transpose(1, 2)  # kernels write the layout of the next layer
    return out, q.new_empty(q.shape[:-1], dtype=torch.float32)


def _attention_flops(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Any, causal: bool) -> float:
    """Return the operations of two products of [length, width] by [width, keys]. A causal kernel leaves out the half that is
    masked."""
    return 4.0 * q.numel() * k.shape[-2] / (2 if causal else 1)


_LAWS["zerobook::attention"] = _attention_flops


class _Attention(torch.autograd.Function):
    """Attention with the shapes of what its kernel saves. It is an operation, so that selective checkpointing can keep it."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, follow: Follow, causal: bool
    ) -> torch.Tensor:
        out, sums = _attention(q, k, v, bias, causal)
        ctx.follow, ctx.flops = follow, _attention_flops(q, k, v, bias, causal)
        ctx.save_for_backward(q, k, v, bias, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, bias, *_ = ctx.saved_tensors
        ctx.follow.flops += 2.5 * ctx.flops  # the recomputed scores, and four products for the gradients
        needed = bias is not None and ctx.needs_input_grad[3]
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), torch.empty_like(bias) if needed else None
        return *grads, None, None


@contextmanager
def _kernels(device: str, follow: Follow) -> Iterator[None]:
    """Replace attention by that of ``device``. On fake tensors, torch takes the plain implementation, which devices use only
    for unusual shapes.

    The conditions are those of torch 2.13, aten/src/ATen/native/transformers/sdp_utils_cpp.h and cuda/sdp_utils.cpp.
    """
    plain = F.scaled_dot_product_attention

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        alike = query.ndim == 4 and query.shape[:2] == key.shape[:2] == value.shape[:2]
        on_cpu = device == "cpu" and (dropout_p > 0 or (attn_mask is not None and attn_mask.requires_grad))
        if not (alike or options.get("enable_gqa")) or on_cpu:
            return plain(query, key, value, attn_mask, dropout_p, is_causal, **options)
        if torch.is_autocast_enabled(query.device.type):  # the tensors are on a CPU, whatever device is simulated
            dtype = torch.get_autocast_dtype(query.device.type)
            query, key, value = (t.to(dtype) for t in (query, key, value))
            attn_mask = attn_mask.to(dtype) if attn_mask is not None and attn_mask.is_floating_point() else attn_mask
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.empty_like(attn_mask, dtype=query.dtype)  # kernels accept only a mask that is added to the scores
        return _Attention.apply(query, key, value, attn_mask, follow, is_causal)

    with _replaced(F, "scaled_dot_product_attention", attend):
        yield


_IN_FP32 = {
    F: ("layer_norm", "group_norm", "softmax", "log_softmax", "cross_entropy", "nll_loss", "mse_loss", "softplus"),
    torch: ("softmax", "log_softmax", "layer_norm", "pow", "rsqrt", "exp", "log", "cumsum", "sum", "norm", "reciprocal"),
    torch.Tensor: (
        "softmax", "log_softmax", "pow", "__pow__", "__rpow__", "rsqrt", "exp", "log", "cumsum", "sum", "norm", "reciprocal"
    ),
}  # fmt: skip
"""Operations that autocast runs in fp32 on CUDA and not on the CPU (torch 2.13, aten/src/ATen/autocast_mode.h)."""


@contextmanager
def _cuda(autocasts: bool, follow: Follow) -> Iterator[None]:
    """Simulate CUDA where it differs from the CPU, on whose fake tensors a trace runs: the list of autocast above, a fused
    dropout, which saves a mask of one byte an element, and tensors that are moved to host memory."""

    def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        return torch.native_dropout(input, p, True)[0] if training and p > 0 else input

    def raised(inner: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: inner(*tree_map_only(torch.Tensor, _raised, args), **kwargs)

    def to_host(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
        follow.host += tensor.nbytes
        return tensor.shape, tensor.dtype

    def on_host(pin_memory: bool) -> torch.autograd.graph.saved_tensors_hooks:
        return torch.autograd.graph.saved_tensors_hooks(to_host, lambda kept: torch.empty(kept[0], dtype=kept[1]))

    with ExitStack() as stack:
        stack.enter_context(_replaced(F, "dropout", dropout))
        stack.enter_context(_replaced(recompute, "save_on_cpu", on_host))
        for owner, names in _IN_FP32.items() if autocasts else ():
            for name in names:
                stack.enter_context(_replaced(owner, name, raised(getattr(owner, name))))
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    inherited, original = name not in vars(owner), getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name) if inherited else setattr(owner, name, original)


def _raised(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


@contextmanager
def _unpacked(sure: bool) -> Iterator[None]:
    """Treat rows as not packed where no position ids are given. transformers looks at the values of position ids; for fake
    tensors it assumes the worst case, a mask."""
    from transformers import masking_utils

    name = "find_packed_sequence_indices"
    with _replaced(masking_utils, name, lambda *_, **__: None) if sure and hasattr(masking_utils, name) else nullcontext():
        yield


@contextmanager
def _unsaid() -> Iterator[None]:
    """Silence the tracebacks that torch prints for an operation without a shape rule. The caller reports the error."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


@contextmanager
def _autocast(device: str, dtype: torch.dtype | None) -> Iterator[None]:
    """Enable autocast like torch.autocast, which refuses devices that this machine does not have."""
    if dtype is None:
        yield
        return
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, dtype)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])

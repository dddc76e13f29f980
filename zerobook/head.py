"""A language model's output layer (its head), and the cross-entropy that is computed in it, a chunk of tokens at a time.

The logits of a micro-batch are its largest tensor: with a vocabulary of 128,000, one position has 0.5 MB of them in fp32. Here
a chunk of positions is multiplied with the output layer, its loss and gradients are computed, and its logits are dropped. No
position is computed twice: the gradients with respect to the layer's input and weight are made in the forward pass, since
they differ from those of the backward pass by a factor only. Positions without a target are left out where the batch says
which ones have a target.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.nn.functional import linear, log_softmax

from zerobook.constants import IGNORE
from zerobook.utils.replaced import replaced

CHUNK = {"cpu": 2**23, "cuda": 2**26}
"""Device type -> logits that are computed at once. They need 8 to 12 bytes each: up to 100 MB on a CPU; on a GPU 800 MB, which
are 512 positions at a vocabulary of 128,000."""
TILE = 128
"""Positions of a chunk are a multiple of this number, if that many fit: the kernels of matrix products compute tiles."""
HALF_SCALE = 1024.0
"""Factor of fp16 gradients of logits, which are probabilities: those under 6e-8 would round to 0. It is a power of 2, so it
rounds nothing itself."""


SUPERVISED = "supervised"
"""Name of the positions in a batch that have a target: int64 [supervised], in the flattened rows."""


def install(model: nn.Module) -> LossHead | None:
    """Let the model's output layer compute the loss, if the model returns that layer's output unchanged as its logits.

    Other models are left as they are: those that scale or cap their logits (Gemma 2, Cohere) or add to them (BART), and those
    whose output layer is quantised, has an adapter or a hook (``device_map``), or was divided among processes while it was
    loaded. Call it before the model is distributed. It computes nothing.
    """
    owner: Any = getattr(model, "get_base_model", lambda: model)()
    layer = owner.get_output_embeddings() if hasattr(owner, "get_output_embeddings") else None
    # A forward of the instance is a hook, which moves tensors between devices.
    if type(layer) is not nn.Linear or hasattr(layer.weight, "device_mesh") or "forward" in vars(layer):
        return None
    head = LossHead(layer)
    if not _returned_unchanged(owner, layer):
        del layer.forward
        return None
    # It is not a module, so it is not part of the state dict.
    model.loss_head = head  # type: ignore[assignment]
    return head


def _returned_unchanged(owner: Any, layer: nn.Linear) -> bool:
    """Return whether the model's logits are the tensor that its output layer returns. The layers below do not run."""
    from transformers.modeling_outputs import BaseModelOutput

    class Output(BaseModelOutput):
        """Output of the layers below. What else a model asks for is None."""

        def __getattr__(self, name: str) -> None:
            if name.startswith("_"):
                raise AttributeError(name)

    logits = torch.zeros(1, 1, 1)
    states = Output(last_hidden_state=torch.zeros(1, 1, layer.in_features))
    ids = torch.zeros(1, 1, dtype=torch.int64)
    inputs = {"input_ids": ids}
    if owner.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids
    with ExitStack() as stack:
        for module in owner.modules():
            if module is not owner:
                stack.enter_context(replaced(module, "forward", lambda *_, **__: states))
        stack.enter_context(replaced(layer, "forward", lambda *_, **__: logits))
        try:
            output = owner.forward(**inputs, use_cache=False)
        # Architectures raise different errors where they need more than that.
        except Exception:
            return False
    return getattr(output, "logits", None) is logits


class LossHead:
    """The output layer of a model. It returns the loss inside of `computing`, and a part of the logits inside of `keeping`.

    The layer keeps its class, its hooks and its place in the model, so strategies gather its weight as before.

    Args:
        layer: the output layer. Its ``forward`` is replaced.
    """

    def __init__(self, layer: nn.Linear):
        self.layer = layer
        self._targets: torch.Tensor | None = None
        self._positions: torch.Tensor | None = None
        self._kept: slice | None = None
        layer.forward = self._forward  # type: ignore[assignment]  # of this instance

    @contextmanager
    def computing(self, targets: torch.Tensor, positions: torch.Tensor | None) -> Iterator[None]:
        """Return a context in which the model's ``logits`` are the summed cross-entropy, a scalar in fp32.

        Args:
            targets: int64 [rows, length]; IGNORE where nothing is predicted.
            positions: int64 [supervised], the flattened positions that have a target; None: all are computed.
        """
        self._targets = targets
        self._positions = positions
        try:
            yield
        finally:
            self._targets = None
            self._positions = None

    @contextmanager
    def keeping(self, columns: slice) -> Iterator[None]:
        """Return a context in which the model's ``logits`` are those of some columns of the rows.

        The logits of complete rows need more memory than a training step, which never has all of them.
        """
        self._kept = columns
        try:
            yield
        finally:
            self._kept = None

    def _forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weight = self.layer.weight
        bias = self.layer.bias
        if self._kept is not None:
            hidden = hidden[:, self._kept]
        if self._targets is None:
            return linear(hidden, weight, bias)
        hidden = hidden.flatten(0, -2)
        targets = self._targets.flatten()
        if self._positions is not None:
            hidden = hidden.index_select(0, self._positions)
            targets = targets.index_select(0, self._positions)
        return linear_cross_entropy(hidden, weight, bias, targets)


def linear_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
) -> torch.Tensor:
    """Return the summed cross-entropy of ``linear(hidden, weight, bias)``, without all of its logits in memory.

    Products are computed in autocast's dtype or in that of ``weight``, the softmax and sums in fp32. The gradient can be
    computed once.

    Args:
        hidden: float [positions, width].
        weight: float [vocabulary, width].
        bias: float [vocabulary], or None.
        targets: int64 [positions]; IGNORE where nothing is predicted.

    Returns:
        Scalar, fp32, in nats.
    """
    if len(hidden) != len(targets):
        raise ValueError(f"{len(hidden)} positions have {len(targets)} targets")
    if not torch.is_grad_enabled():
        # Autograd tells a function that a parameter needs a gradient here too.
        hidden = hidden.detach()
        weight = weight.detach()
        if bias is not None:
            bias = bias.detach()
    return cast("torch.Tensor", _LinearCrossEntropy.apply(hidden, weight, bias, targets))


def chunk_starts(positions: int, chunk_length: int) -> Iterable[int]:
    """Return the first position of each chunk."""
    return range(0, positions, chunk_length)


class _LinearCrossEntropy(torch.autograd.Function):
    """Keeps the gradients for a gradient of 1, and multiplies them by the real one in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
    ) -> torch.Tensor:
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        needs_hidden, needs_weight, needs_bias, _ = ctx.needs_input_grad
        with torch.autocast(device, enabled=False):
            cast_weight = weight.to(dtype)
            cast_bias = None if bias is None else bias.to(dtype)
            total = torch.zeros((), dtype=torch.float32, device=hidden.device)
            gradients = _Gradients()
            if needs_hidden:
                # fp16 gradients are made with a scale, which fp32 can take out again.
                gradients.hidden = torch.empty_like(hidden, dtype=torch.float32 if dtype == torch.float16 else None)
            if needs_weight:
                gradients.weight = torch.zeros_like(weight, dtype=torch.float32)
            if needs_bias:
                gradients.bias = torch.zeros_like(cast("torch.Tensor", bias), dtype=torch.float32)

            chunk_length = max(1, CHUNK.get(device, CHUNK["cuda"]) // len(weight))
            if chunk_length > TILE:
                chunk_length -= chunk_length % TILE
            for start in chunk_starts(len(targets), chunk_length):
                chunk = slice(start, start + chunk_length)
                ignored = targets[chunk, None] == IGNORE
                chunk_targets = targets[chunk, None].clamp(min=0)
                # What is not finite would spread to the gradients of other positions.
                inputs = hidden[chunk].to(dtype).masked_fill(ignored, 0.0)
                # On a GPU, one kernel converts fp16 to fp32 and normalises. Other dtypes have an fp32 copy in between.
                log_probabilities = log_softmax(linear(inputs, cast_weight, cast_bias), dim=-1, dtype=torch.float32)
                target_log_probabilities = log_probabilities.gather(1, chunk_targets)
                total -= target_log_probabilities.masked_fill(ignored, 0.0).sum()
                if needs_hidden or needs_weight or needs_bias:
                    # The gradient of the logits is the softmax, less 1 at the target. The difference is made in fp32.
                    at_targets = target_log_probabilities.exp() - 1
                    if dtype == torch.float16:
                        log_probabilities += math.log(HALF_SCALE)
                        at_targets *= HALF_SCALE
                    logits_gradient = log_probabilities
                    if dtype != torch.float32:
                        logits_gradient = torch.empty_like(log_probabilities, dtype=dtype)
                    torch.exp(log_probabilities, out=logits_gradient)
                    logits_gradient.scatter_(1, chunk_targets, at_targets.to(dtype))
                    gradients.add(chunk, logits_gradient, inputs, cast_weight, ignored)
                    del logits_gradient
                # Freed before the next chunk is made.
                del log_probabilities
        ctx.gradients = gradients
        return total

    @staticmethod
    def backward(ctx: Any, *output_gradients: Any) -> tuple[torch.Tensor | None, ...]:
        gradients = ctx.gradients
        ctx.gradients = None
        if gradients is None:
            raise RuntimeError("the gradient of linear_cross_entropy can be computed once")
        gradients.multiply_(output_gradients[0])
        # The targets have no gradient.
        return gradients.hidden, gradients.weight, gradients.bias, None


class _Gradients:
    """The gradients with respect to the layer's input, weight and bias; None if one is not needed."""

    hidden: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    def add(
        self, chunk: slice, logits_gradient: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, ignored: torch.Tensor
    ) -> None:
        """Add a chunk of positions.

        Args:
            logits_gradient: [positions, vocabulary], in the dtype of ``weight``; times `HALF_SCALE` in fp16.
            inputs: [positions, width], in the dtype of ``weight``; 0 where ``ignored`` is true.
            weight: the layer's.
            ignored: bool [positions, 1], true for positions without a target.
        """
        is_fp16 = weight.dtype == torch.float16
        scale = HALF_SCALE if is_fp16 else 1.0
        on_tensor_cores = sums_in_fp32(weight)
        if self.hidden is not None:
            # A sum of scaled fp16 gradients could exceed the range.
            if is_fp16 and on_tensor_cores:
                product = torch.mm(logits_gradient, weight, out_dtype=torch.float32).div_(scale)
            elif is_fp16:
                product = (logits_gradient.float() @ weight.float()).div_(scale)
            else:
                product = logits_gradient @ weight
            self.hidden[chunk] = product.masked_fill_(ignored, 0.0)
        # Sums over chunks are in fp32.
        if self.weight is not None and on_tensor_cores:
            options: dict[str, Any] = {"out_dtype": torch.float32, "alpha": 1 / scale, "out": self.weight}
            torch.addmm(self.weight, logits_gradient.T, inputs, **options)
        elif self.weight is not None and weight.dtype == torch.bfloat16:
            self.weight += logits_gradient.T @ inputs
        elif self.weight is not None:
            self.weight.addmm_(logits_gradient.T.float(), inputs.float(), alpha=1 / scale)
        if self.bias is not None:
            # The product sums the rows that are not ignored, without a masked copy of all logits.
            self.bias.addmv_(logits_gradient.T.float(), (~ignored).float().squeeze(1), alpha=1 / scale)

    def multiply_(self, factor: torch.Tensor) -> None:
        """Multiply the gradients by ``factor``, a scalar, in place."""
        for gradient in (self.hidden, self.weight, self.bias):
            if gradient is not None:
                gradient.mul_(factor)


def sums_in_fp32(tensor: torch.Tensor) -> bool:
    """Return whether a product of matrices in the dtype of ``tensor`` can have an fp32 result, which torch 2.8 can on CUDA."""
    return tensor.is_cuda and tensor.dtype in (torch.float16, torch.bfloat16) and hasattr(torch.ops.aten.addmm, "dtype_out")

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

# Device type -> logits that are computed at once. They need 8 to 12 bytes each: up to 100 MB on a CPU; on a GPU 800 MB, which
# are 512 positions at a vocabulary of 128,000.
CHUNK = {"cpu": 2**23, "cuda": 2**26}
# Positions of a chunk are a multiple of this number, if that many fit: the kernels of matrix products compute tiles.
TILE = 128
# Factor of the gradients of logits in fp16. They are probabilities, and fp16 would round those under 6e-8 to 0. The factor is
# a power of 2, so a product with it is exact.
HALF_SCALE = 1024.0
# Key in a batch of the positions that have a target: int64 [supervised], indices into the flattened rows.
SUPERVISED = "supervised"


def install(model: nn.Module) -> LossHead | None:
    """Let the model's output layer compute the loss, if the model returns that layer's output unchanged as its logits.

    Other models are left as they are: those that scale or cap their logits (Gemma 2, Cohere) or add to them (BART), and those
    whose output layer is quantised, has an adapter or a hook (``device_map``), or was divided among processes while it was
    loaded.

    Call this before the model is distributed. No layer of the model runs.

    Returns:
        The head, which is also the attribute ``loss_head`` of the model; None if the model is left as it is.
    """
    # PEFT wraps the model that has the output layer.
    base_model: Any = getattr(model, "get_base_model", lambda: model)()
    layer = base_model.get_output_embeddings() if hasattr(base_model, "get_output_embeddings") else None
    # accelerate's hook for ``device_map`` replaces the forward method of the instance.
    if type(layer) is not nn.Linear or hasattr(layer.weight, "device_mesh") or "forward" in vars(layer):
        return None
    if not _has_unchanged_logits(base_model, layer):
        return None
    head = LossHead(layer)
    # The head is not a module, so it is not part of the state dict.
    model.loss_head = head  # type: ignore[assignment]
    return head


def _has_unchanged_logits(model: Any, layer: nn.Linear) -> bool:
    """Return whether the model's logits are the tensor that its output layer returns.

    Only the model's own forward method runs. The modules in it are replaced by functions that return zeros.
    """
    from transformers.modeling_outputs import BaseModelOutput

    class HiddenStates(BaseModelOutput):
        """Output of every module below the output layer. Attributes that it does not have are None."""

        def __getattr__(self, name: str) -> None:
            if name.startswith("_"):
                raise AttributeError(name)

    logits = torch.zeros(1, 1, 1)
    states = HiddenStates(last_hidden_state=torch.zeros(1, 1, layer.in_features))
    ids = torch.zeros(1, 1, dtype=torch.int64)
    inputs = {"input_ids": ids}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids
    with ExitStack() as stack:
        for module in model.modules():
            if module is not model:
                stack.enter_context(replaced(module, "forward", lambda *_, **__: states))
        stack.enter_context(replaced(layer, "forward", lambda *_, **__: logits))
        try:
            output = model.forward(**inputs, use_cache=False)
        # A model that needs other inputs or other hidden states raises some error, and is left as it is.
        except Exception:
            return False
    return getattr(output, "logits", None) is logits


class LossHead:
    """The output layer of a model, which returns logits, and within two contexts something else instead: the loss within
    `computing`, and the logits of some positions within `keeping`.

    The layer keeps its class, its hooks and its place in the model, so strategies gather its weight as before.

    Args:
        layer: the output layer. Its ``forward`` is replaced.
    """

    def __init__(self, layer: nn.Linear):
        self.layer = layer
        self._targets: torch.Tensor | None = None
        self._positions: torch.Tensor | None = None
        self._columns: slice | None = None
        # Replaced for this layer alone, not for its class.
        layer.forward = self._forward  # type: ignore[assignment]

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
        """Return a context in which the model's ``logits`` are those of some positions of each row.

        The logits of complete rows need more memory than a training step, which never has all of them.
        """
        self._columns = columns
        try:
            yield
        finally:
            self._columns = None

    def _forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weight = self.layer.weight
        bias = self.layer.bias
        if self._columns is not None:
            hidden = hidden[:, self._columns]
        # Outside of `computing`, the layer returns logits.
        if self._targets is None:
            return linear(hidden, weight, bias)
        # The loss is a sum over positions, so their order in rows does not matter.
        hidden = hidden.flatten(0, -2)
        targets = self._targets.flatten()
        if self._positions is not None:
            hidden = hidden.index_select(0, self._positions)
            targets = targets.index_select(0, self._positions)
        return linear_cross_entropy(hidden, weight, bias, targets)


def linear_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
) -> torch.Tensor:
    """Return the summed cross-entropy of the logits ``linear(hidden, weight, bias)``, which are never all in memory.

    Products are computed in autocast's dtype, or without autocast in that of ``weight``; the softmax and sums in fp32. Only
    one backward pass is possible.

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
        # Under ``no_grad`` too, autograd tells the function that a parameter needs a gradient. It would be computed in vain.
        hidden = hidden.detach()
        weight = weight.detach()
        if bias is not None:
            bias = bias.detach()
    return cast("torch.Tensor", _LinearCrossEntropy.apply(hidden, weight, bias, targets))


def chunk_starts(positions: int, chunk_length: int) -> Iterable[int]:
    """Return the first position of each chunk. The planner replaces this function, to run few chunks."""
    return range(0, positions, chunk_length)


class _LinearCrossEntropy(torch.autograd.Function):
    """Computes the gradients in the forward pass, for an output gradient of 1. The backward pass multiplies them by the real
    output gradient."""

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
                # In fp16, gradients are computed times `HALF_SCALE`, and then divided by it in fp32.
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
                # A value that is not finite at an ignored position would spread to the gradients of other positions.
                inputs = hidden[chunk].to(dtype).masked_fill(ignored, 0.0)
                # On a GPU, one kernel converts fp16 to fp32 and normalises. Other dtypes have an fp32 copy in between.
                log_probabilities = log_softmax(linear(inputs, cast_weight, cast_bias), dim=-1, dtype=torch.float32)
                target_log_probabilities = log_probabilities.gather(1, chunk_targets)
                total -= target_log_probabilities.masked_fill(ignored, 0.0).sum()
                if needs_hidden or needs_weight or needs_bias:
                    logits_gradient = _gradient_of_logits(log_probabilities, target_log_probabilities, chunk_targets, dtype)
                    gradients.add(chunk, logits_gradient, inputs, cast_weight, ignored)
                    del logits_gradient
                # The largest tensors are freed before those of the next chunk are made.
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


def _gradient_of_logits(
    log_probabilities: torch.Tensor, target_log_probabilities: torch.Tensor, targets: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return the gradient of the summed cross-entropy with respect to the logits: the softmax, less 1 at the target.

    In fp16 it is multiplied by `HALF_SCALE`. To save memory, ``log_probabilities`` (fp32 [positions, vocabulary]) are
    overwritten.
    """
    # The difference is computed in fp32, and rounded to ``dtype`` afterwards.
    at_targets = target_log_probabilities.exp() - 1
    if dtype == torch.float16:
        # The exponential of a sum is a product, so this is the scale of the softmax.
        log_probabilities += math.log(HALF_SCALE)
        at_targets *= HALF_SCALE
    gradient = log_probabilities
    if dtype != torch.float32:
        gradient = torch.empty_like(log_probabilities, dtype=dtype)
    torch.exp(log_probabilities, out=gradient)
    return gradient.scatter_(1, targets, at_targets.to(dtype))


class _Gradients:
    """The gradients with respect to the layer's input, weight and bias, each None if it is not needed."""

    hidden: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    def add(
        self, chunk: slice, logits_gradient: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, ignored: torch.Tensor
    ) -> None:
        """Write the gradient of the inputs of a chunk of positions, and add the chunk to the gradients of weight and bias.

        Args:
            logits_gradient: [positions, vocabulary], in the dtype of ``weight``; times `HALF_SCALE` in fp16.
            inputs: [positions, width], in the dtype of ``weight``; 0 where ``ignored`` is true.
            weight: the layer's weight, in the dtype of the products.
            ignored: bool [positions, 1], true for positions without a target.
        """
        is_fp16 = weight.dtype == torch.float16
        scale = HALF_SCALE if is_fp16 else 1.0
        can_return_fp32 = has_fp32_products(weight)
        if self.hidden is not None:
            # A sum of scaled gradients could exceed the range of fp16, so it is made in fp32.
            if is_fp16 and can_return_fp32:
                product = torch.mm(logits_gradient, weight, out_dtype=torch.float32).div_(scale)
            elif is_fp16:
                product = (logits_gradient.float() @ weight.float()).div_(scale)
            else:
                product = logits_gradient @ weight
            self.hidden[chunk] = product.masked_fill_(ignored, 0.0)
        # The sum over chunks is in fp32.
        if self.weight is not None and can_return_fp32:
            options: dict[str, Any] = {"out_dtype": torch.float32, "alpha": 1 / scale, "out": self.weight}
            torch.addmm(self.weight, logits_gradient.T, inputs, **options)
        elif self.weight is not None and weight.dtype == torch.bfloat16:
            # bf16 has the range of fp32, so the product of a chunk may be in bf16.
            self.weight += logits_gradient.T @ inputs
        elif self.weight is not None:
            # fp32, or fp16 on a device whose products are in fp16.
            self.weight.addmm_(logits_gradient.T.float(), inputs.float(), alpha=1 / scale)
        if self.bias is not None:
            # The gradient of the bias is the sum over positions. As a product with a vector of 0 and 1, it leaves out ignored
            # positions without a masked copy of all logits.
            self.bias.addmv_(logits_gradient.T.float(), (~ignored).float().squeeze(1), alpha=1 / scale)

    def multiply_(self, factor: torch.Tensor) -> None:
        """Multiply the gradients by ``factor``, a scalar, in place."""
        for gradient in (self.hidden, self.weight, self.bias):
            if gradient is not None:
                gradient.mul_(factor)


def has_fp32_products(tensor: torch.Tensor) -> bool:
    """Return whether torch can return a product of half-precision matrices in fp32, as it can on CUDA from 2.8 on.

    Args:
        tensor: one of the matrices.
    """
    return tensor.is_cuda and tensor.dtype in (torch.float16, torch.bfloat16) and hasattr(torch.ops.aten.addmm, "dtype_out")

"""Changes to a plan for what other programs keep in memory, and a recipe of ours does not.

A row of ``benchmarks/published_runs.jsonl`` names its program's differences under ``memory``, each with its source in the
row's caveats:

- ``saved``: ``second_products``: checkpointing saves every second matrix product, and attention.
- ``inputs_on_host``: the inputs of checkpointed layers are in host memory.
- ``layers``: ``fused``: norms, rotary positions and gated layers keep nothing between matrix products but their inputs and
  results, as the kernels of liger-kernel do, and layers without checkpointing that torch.compile made.
- ``loss``: ``megatron``, which overwrites fp32 logits; ``torchtune_spring``, which copies them twice; ``torchtune_compiled``,
  which overwrites logits in half precision.
- ``loss_chunks``: how many chunks the logits are computed in.
- ``whole_model_at_load``: every GPU holds all weights before they are sharded.
- ``copies_gathered``: what is gathered from host memory is copied once on the GPU.
- ``shards_embeddings``: FSDP gathers and frees the weights outside of layers one after the other.
- ``shards_scales``: the scales of quantised weights are sharded as their weights are.
- ``context_gb``: what the driver shows on that machine before the first tensor.
- ``communicators``: NCCL communicators, if there are several.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from zerobook import head, objective
from zerobook.models import recompute
from zerobook.utils.replaced import replaced

SECOND_PRODUCTS = (0, 1, 2, 4)
"""Places of every second product among those of a Llama layer, which are q, k, v, o, gate, up and down. q, k and v are one
product there. The last is only added to the layer's input, and compiled code saves nothing that no backward pass reads."""


@contextmanager
def traced_as_it_ran(facts: dict[str, Any]) -> Iterator[None]:
    """Let a trace inside keep what the row's program keeps."""
    program = facts.get("memory", {})
    with ExitStack() as stack:
        if "saved" in program:
            stack.enter_context(replaced(recompute._SavedResults, "is_worth_saving", _saves_second_products))
        if "layers" in program:
            stack.enter_context(_fused_layers())
        if "loss" in program:
            stack.enter_context(replaced(objective, "_sum_cross_entropy", _LOSSES[program["loss"]]))
        if "loss_chunks" in program:
            tokens = facts["seq_len"] * facts["micro_batch"]
            logits_of_chunk = tokens // program["loss_chunks"] * facts["arch"]["vocab"]
            stack.enter_context(replaced(head, "CHUNK", dict.fromkeys(head.CHUNK, logits_of_chunk)))
        yield


def _saves_second_products(saved: Any, name: str, args: Any, result: Any) -> bool:
    """Return whether a compiled layer saves a result, in place of `_SavedResults.is_worth_saving`."""
    if name not in recompute._PRODUCTS:
        return True
    place = getattr(saved, "products", 0)
    saved.products = place + 1
    return place in SECOND_PRODUCTS


class _GatedProduct(torch.autograd.Function):
    """silu(gate) * up. It saves its inputs, and writes their gradients over them."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gate, up = ctx.saved_tensors
        return gate, up


class _RmsNorm(torch.autograd.Function):
    """It saves its input and a number for each position, and writes its input's gradient over its output's."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight, hidden.new_empty(hidden.shape[:-1], dtype=torch.float32))
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        _, weight, _ = ctx.saved_tensors
        return grad, torch.empty_like(weight)


@contextmanager
def _fused_layers() -> Iterator[None]:
    """Let Llama's layers keep what liger-kernel 0.8 keeps (src/liger_kernel/ops: swiglu.py, rms_norm.py, rope.py). The
    partitioner of torch.compile keeps the same, since a product reads each of these tensors in the backward pass."""
    from transformers.models.llama import modeling_llama

    def run_mlp(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(_GatedProduct.apply(self.gate_proj(hidden), self.up_proj(hidden)))

    def run_norm(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        return _RmsNorm.apply(hidden, self.weight)

    def rotate_in_place(q: torch.Tensor, k: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return q, k

    with ExitStack() as stack:
        stack.enter_context(replaced(modeling_llama.LlamaMLP, "forward", run_mlp))
        stack.enter_context(replaced(modeling_llama.LlamaRMSNorm, "forward", run_norm))
        stack.enter_context(replaced(modeling_llama, "apply_rotary_pos_emb", rotate_in_place))
        yield


class _OverwritingLoss(torch.autograd.Function):
    """It keeps the logits, and writes their gradient over them."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(logits)
        return logits.new_empty((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return ctx.saved_tensors[0]


def _megatron_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Loss of Megatron-LM in 2021 (megatron/mpu/cross_entropy.py): of fp32 logits."""
    return _OverwritingLoss.apply(logits.float())


def _torchtune_compiled_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Loss of torchtune in autumn 2024 (torchtune/modules/loss/ce_chunked_output_loss.py), compiled: each chunk of logits is
    converted to fp32 in a kernel."""
    return _OverwritingLoss.apply(logits)


def _torchtune_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Loss of torchtune's recipes in spring 2024 (recipes/lora_finetune_single_device.py): fp32 logits, a copy without each
    row's last position, and log-probabilities along the second of three dimensions, for which the kernel takes another copy."""
    fp32_logits = logits.float()
    copied = fp32_logits[:, :-1].contiguous()
    log_probabilities = copied.transpose(1, 2).contiguous().log_softmax(1)
    return F.nll_loss(log_probabilities, targets[:, 1:].clamp(min=0), reduction="sum")


_LOSSES = {
    "megatron": _megatron_loss,
    "torchtune_spring": _torchtune_loss,
    "torchtune_compiled": _torchtune_compiled_loss,
}
"""Name of a loss -> function that has its memory."""

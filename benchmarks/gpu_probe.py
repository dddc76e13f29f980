"""Examine in seconds what a GPU can do, before anything is trained for long: the part ``probe`` of benchmarks/gpu.py.

collectives   each collective of NCCL with one rank, and whether its flight recorder has them
attention     which backend of torch's attention takes which dtypes, grouped heads and masks; its error and its seconds
new lengths   seconds of the first and the second attention at 16 lengths, by torch's order of backends and by zerobook's
head          zerobook's loss beside torch's at 16,384 tokens and a vocabulary of 128,256: seconds, memory, error
host waits    where a training step waits for the GPU, under one process, ZeRO-3 and FSDP2

Each of them runs in a process of its own, and each try in it is recorded with its error.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import gpu_waits
from benchmarks.gpu_models import elapsed, seconds
from benchmarks.gpu_setting import ROOT, Case, Row, Setting, call, failure
from zerobook.utils import subprocess_launch
from zerobook.utils.attention import prepare_attention

if TYPE_CHECKING:
    import torch

BACKENDS = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH")
"""Backends of `torch.nn.attention.SDPBackend`."""
RECORDERS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
"""Functions of torch that return what a flight recorder has: NCCL's own, and the generic one."""
NEW_LENGTHS = 16
"""Lengths at which attention is computed for the first time."""


def probe(setting: Setting) -> dict[str, Case]:
    cases = {
        "collectives": Case(partial(_call, "collectives", {"device": setting.device}), 25),
        "attention": Case(partial(_call, "attention", {"device": setting.device, "tiny": setting.tiny}), 40),
        "head": Case(partial(_call, "head", {"device": setting.device, "tiny": setting.tiny}), 40),
    }
    for order in ("torch", "zerobook"):
        arguments = {"device": setting.device, "tiny": setting.tiny, "order": order}
        cases[f"new lengths, order of {order}"] = Case(partial(_call, "new_lengths", arguments), 60)
    for strategy in ("single", "zero3", "fsdp"):
        cases[f"host waits, {strategy}"] = Case(partial(_host_waits, setting, strategy), 40)
    return cases


def _call(function: str, arguments: dict[str, object], limit: float, rows: dict[str, Row]) -> Row:
    return call(f"benchmarks.gpu_probe.{function}", limit, **arguments)


def _host_waits(setting: Setting, strategy: str, limit: float, rows: dict[str, Row]) -> Row:
    flags = setting.text | {
        "model_name_or_path": setting.model("small"),
        "block_size": 64,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_train_steps": gpu_waits.LAST_STEP + 1,
        # A log point waits on purpose, so there is none in the steps that are watched.
        "logging_steps": gpu_waits.LAST_STEP + 1,
        "mixed_precision": "no" if setting.cpu else "bf16",
        "on_low_disk": "warn",
        "hooks": f"{gpu_waits.__file__}:HostWaits",
    }
    launcher = ["--config_file", str(ROOT / "accelerate_configs" / f"{strategy}.yaml")]
    with tempfile.TemporaryDirectory(dir=setting.folder) as name:
        result = Path(name) / "waits.json"
        words = subprocess_launch.flags(flags | {"output_dir": Path(name) / "run"})
        line = subprocess_launch.command(launcher, 1, ROOT / "recipes" / "causal_lm.py", *words)
        code, text = subprocess_launch.run(line, limit, {gpu_waits.RESULT: str(result)}, cwd=ROOT)
        row: Row = json.loads(result.read_text()) if result.exists() else {}
    return row | failure(code, text, limit)


# --- in processes of their own
def row_or_error(work: Callable[[], Row]) -> Row:
    """Return the row of ``work``, or its error. Warnings that torch gives with an error say what it refused."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            return work()
        # Libraries raise different errors for what they do not support.
        except Exception as error:
            reasons = [str(warning.message).split(" (Triggered")[0] for warning in caught]
            return {"error": f"{type(error).__name__}: {error}"[:600], "warnings": reasons[:12]}


def collectives(device: str) -> Iterator[Row]:
    """Try the collectives that strategies use, with one rank."""
    # The size of the flight recorder, under the name of torch 2.9 and newer and the older one.
    os.environ["TORCH_FR_BUFFER_SIZE"] = "1000"
    os.environ["TORCH_NCCL_TRACE_BUFFER_SIZE"] = "1000"
    import torch
    import torch.distributed as dist

    backend = "gloo"
    device_id = None
    if device == "cuda":
        backend = "nccl"
        device_id = torch.device("cuda", 0)
        torch.cuda.set_device(device_id)
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    dist.init_process_group(backend, store=store, rank=0, world_size=1, device_id=device_id)
    row: Row = {"backend": backend}
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        source = torch.arange(2**20, device=device).remainder(100).to(dtype)
        target = torch.empty_like(source)
        calls = {
            "all_reduce": partial(_in_place, dist.all_reduce, source, target),
            "broadcast": partial(_in_place, partial(dist.broadcast, src=0), source, target),
            "all_gather_into_tensor": partial(dist.all_gather_into_tensor, target, source),
            "reduce_scatter_tensor": partial(dist.reduce_scatter_tensor, target, source),
            "all_to_all_single": partial(dist.all_to_all_single, target, source),
        }
        for name, collective in calls.items():
            row[f"{name}, {_name(dtype)}"] = row_or_error(partial(_collective, collective, source, target, device))
            yield row
    row["barrier"] = row_or_error(lambda: {"seconds": seconds(dist.barrier, device, rounds=5)})
    row["all_gather_object"] = row_or_error(partial(_gathered_object, {"a": [1, "two"]}))
    for name in RECORDERS:
        row[name] = row_or_error(partial(_recorded, name))
    yield row
    row["destroyed"] = row_or_error(lambda: {"result": dist.destroy_process_group()})
    yield row


def _in_place(collective: Callable[[Any], object], source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source)
    collective(target)


def _collective(collective: Callable[[], object], source: torch.Tensor, target: torch.Tensor, device: str) -> Row:
    """Return seconds, and whether the one rank received what it sent."""
    import torch

    target.zero_()
    median = seconds(collective, device, rounds=5)
    return {"seconds": median, "right": torch.equal(source, target)}


def _gathered_object(value: object) -> Row:
    import torch.distributed as dist

    received: list[object] = [None]
    dist.all_gather_object(received, value)
    return {"right": received == [value]}


def _recorded(function: str) -> Row:
    """Return how many collectives a flight recorder has, and the newest one."""
    import torch

    entries = json.loads(getattr(torch._C._distributed_c10d, function)()).get("entries", [])
    return {"collectives": len(entries), "newest": entries[-1] if entries else None}


def attention(device: str, tiny: bool) -> Iterator[Row]:
    """Try every backend with every dtype, with and without grouped heads and a mask, in forward and backward passes."""
    import torch

    row: Row = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for kv_heads in (16, 4):
            for masked in (False, True):
                heads = "grouped heads" if kv_heads < 16 else "full heads"
                case = f"{_name(dtype)}, {heads}, {'a mask' if masked else 'causal'}"
                inputs = _attention_inputs(dtype, kv_heads, masked, device, tiny)
                row[f"{case}: chosen"] = row_or_error(partial(_chosen, *inputs))
                for backend in ("unset", *BACKENDS):
                    row[f"{case}: {backend}"] = row_or_error(partial(_attend, backend, *inputs))
                    yield row


def _attention_inputs(
    dtype: torch.dtype, kv_heads: int, masked: bool, device: str, tiny: bool, more_tokens: int = 0
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Return (query, key, value) that need gradients, and a mask of rows that are padded on the left."""
    import torch

    torch.manual_seed(0)
    length = (32 if tiny else 1024) + more_tokens
    size = 16 if tiny else 128
    tensors = []
    for heads in (16, kv_heads, kv_heads):
        tensors.append(torch.randn(2, heads, length, size, device=device).to(dtype).requires_grad_())
    if not masked:
        return tensors, None
    mask = torch.ones(length, length, dtype=torch.bool, device=device).tril().repeat(2, 1, 1, 1)
    # A row of a mask without any position has no defined output, so each position sees itself.
    mask[1, :, :, : length // 4] = False
    return tensors, mask | torch.eye(length, dtype=torch.bool, device=device)


def _attend(backend: str, tensors: list[torch.Tensor], mask: torch.Tensor | None) -> Row:
    """Return seconds of both passes, and errors relative to the same attention in fp64."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    device = tensors[0].device.type
    with nullcontext() if backend == "unset" else sdpa_kernel(getattr(SDPBackend, backend)):
        results = _passes(tensors, mask)
        median = seconds(partial(_passes, tensors, mask), device, rounds=5)
    exact = _exact_passes(tensors, mask)
    names = ("output", "query", "key", "value")
    errors = {name: _distance(*pair) for name, *pair in zip(names, results, exact, strict=True)}
    finite = all(torch.isfinite(result).all().item() for result in results)
    return {"seconds": median, "errors": errors, "finite": finite}


def _passes(tensors: list[torch.Tensor], mask: torch.Tensor | None) -> list[torch.Tensor]:
    """Return the output and the gradients of (query, key, value)."""
    import torch

    output = _forward(tensors, mask)
    return [output.detach(), *torch.autograd.grad(output, tensors, torch.ones_like(output))]


def _forward(tensors: list[torch.Tensor], mask: torch.Tensor | None) -> torch.Tensor:
    from torch.nn.functional import scaled_dot_product_attention

    query, key, value = tensors
    grouped = query.shape[1] != key.shape[1]
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)


def _exact_passes(tensors: list[torch.Tensor], mask: torch.Tensor | None) -> list[torch.Tensor]:
    """Return the same of attention that is written out, in fp64."""
    import torch

    doubles = [tensor.detach().double().requires_grad_() for tensor in tensors]
    query = doubles[0]
    length = query.shape[2]
    groups = query.shape[1] // doubles[1].shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in doubles[1:])
    if mask is None:
        mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    scores = (query @ key.transpose(2, 3)) / query.shape[3] ** 0.5
    output = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ value
    return [output.detach(), *torch.autograd.grad(output, doubles, torch.ones_like(output))]


def _chosen(tensors: list[torch.Tensor], mask: torch.Tensor | None) -> Row:
    """Return the backend that torch chooses by itself."""
    import torch
    from torch.nn.attention import SDPBackend

    query, key, value = tensors
    grouped = query.shape[1] != key.shape[1]
    number = torch._fused_sdp_choice(query, key, value, mask, 0.0, mask is None, enable_gqa=grouped)
    return {"backend": SDPBackend(number).name}


def new_lengths(device: str, tiny: bool, order: str) -> Iterator[Row]:
    """Measure attention at lengths that the process has not met: cuDNN builds a plan for each new shape.

    Args:
        order: ``torch`` or ``zerobook``: whose choice of the backend that is tried first.
    """
    import torch

    if order == "zerobook":
        prepare_attention()
    row: Row = {"cuDNN enabled": torch.backends.cuda.cudnn_sdp_enabled()}
    # As transformers calls it: heads share keys only where there is no mask.
    for case, kv_heads, masked in (("grouped heads, causal", 4, False), ("full heads, a mask", 16, True)):
        lists: dict[str, list[float]] = {}
        # The first length loads libraries, so it is left out.
        for index in range(NEW_LENGTHS + 1):
            # Lengths of padded batches are multiples of 8.
            inputs = _attention_inputs(torch.bfloat16, kv_heads, masked, device, tiny, 8 * index)
            for call_name in ("first", "second"):
                forward, backward = _timed_passes(*inputs)
                if index > 0:
                    lists.setdefault(f"{call_name} forward", []).append(forward)
                    lists.setdefault(f"{call_name} backward", []).append(backward)
        row[case] = {"seconds": lists} | row_or_error(partial(_chosen, *inputs))
        yield row


def _timed_passes(tensors: list[torch.Tensor], mask: torch.Tensor | None) -> tuple[float, float]:
    """Return the seconds of the forward pass, and those of the backward pass, until the device is done."""
    import torch

    outputs: list[torch.Tensor] = []
    forward = elapsed(lambda: outputs.append(_forward(tensors, mask)), tensors[0].device.type)
    gradient = torch.ones_like(outputs[0])
    backward = elapsed(partial(torch.autograd.grad, outputs[0], tensors, gradient), tensors[0].device.type)
    return forward, backward


HEADS = {
    "bf16 weight": ("bfloat16", "bfloat16", True),
    "fp32 weight, autocast to bf16": ("float32", "bfloat16", True),
    "fp32 weight, autocast to fp16": ("float32", "float16", True),
    "bf16 weight that is not trained": ("bfloat16", "bfloat16", False),
}
"""Name -> dtype of the weight, dtype of products, and whether the weight is trained."""


def head(device: str, tiny: bool) -> Iterator[Row]:
    """Compare the loss of `zerobook.head` and torch's own with torch's in fp32: gradients, seconds and peak memory."""
    tokens = 64 if tiny else 2**14
    vocabulary = 512 if tiny else 128_256
    width = 32 if tiny else 2048
    row: Row = {"tokens": tokens, "vocabulary": vocabulary, "width": width}
    for name, (weight_dtype, dtype, trained) in HEADS.items():
        for kind in ("zerobook", "torch"):
            work = partial(_head, kind, weight_dtype, dtype, trained, (tokens, vocabulary, width), device)
            row[f"{name}: {kind}"] = row_or_error(work)
            yield row


def _head(kind: str, weight_dtype: str, dtype: str, trained: bool, sizes: tuple[int, int, int], device: str) -> Row:
    import torch

    tokens, vocabulary, width = sizes
    torch.manual_seed(0)
    # Logits with a standard deviation of 1, as those of a model at its start.
    weight = (torch.randn(vocabulary, width, device=device) / width**0.5).to(getattr(torch, weight_dtype))
    weight.requires_grad_(trained)
    hidden = torch.randn(tokens, width, device=device).to(getattr(torch, dtype)).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), device=device)
    work = partial(_loss_and_gradients, kind, hidden, weight, targets, dtype)
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    input_bytes = torch.cuda.memory_allocated() if device == "cuda" else 0
    loss, gradients = work()
    row: Row = {"loss": loss.item()}
    if device == "cuda":
        row["peak above inputs"] = torch.cuda.max_memory_allocated() - input_bytes
    # What follows is timed and computed without these gradients in the device's memory.
    host_gradients = [gradient.cpu() for gradient in gradients]
    del gradients
    row["seconds"] = seconds(work, device, rounds=5)
    row["errors"] = row_or_error(partial(_head_errors, hidden, weight, targets, host_gradients, _loss_scale(dtype)))
    return row


def _head_errors(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, gradients: list[torch.Tensor], scale: float
) -> Row:
    """Return the distances of gradients, which have been multiplied by ``scale``, from torch's in fp32."""
    exact_hidden = hidden.detach().float().requires_grad_()
    exact_weight = weight.detach().float().requires_grad_(weight.requires_grad)
    _, exact = _loss_and_gradients("torch", exact_hidden, exact_weight, targets, "float32")
    names = ("hidden", "weight")
    # Without the weight's if it is not trained.
    return {name: _distance(*pair, scale) for name, *pair in zip(names, gradients, exact, strict=False)}


def _loss_scale(dtype: str) -> float:
    """Return the factor of the loss that a loss scaler would use: fp16 cannot hold the gradients of single logits."""
    return 2.0**16 if dtype == "float16" else 1.0


def _loss_and_gradients(
    kind: str, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, dtype: str
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the mean loss, and its scaled gradients with respect to (hidden, and weight where it is trained)."""
    import torch
    from torch.nn.functional import cross_entropy, linear

    from zerobook.head import linear_cross_entropy

    with torch.autocast(hidden.device.type, getattr(torch, dtype), enabled=dtype != "float32"):
        if kind == "zerobook":
            loss = linear_cross_entropy(hidden, weight, None, targets) / len(targets)
        else:
            loss = cross_entropy(linear(hidden, weight).float(), targets)
    inputs = [tensor for tensor in (hidden, weight) if tensor.requires_grad]
    return loss.detach(), list(torch.autograd.grad(loss * _loss_scale(dtype), inputs))


def _distance(result: torch.Tensor, exact: torch.Tensor, scale: float = 1.0) -> float:
    """Return the norm of ``result / scale - exact``, relative to that of ``exact``. Large tensors are taken in pieces."""
    difference = 0.0
    norm = 0.0
    for piece, exact_piece in zip(result.flatten().split(2**24), exact.flatten().split(2**24), strict=True):
        exact_double = exact_piece.double()
        difference += (piece.to(exact_double) / scale - exact_double).square().sum().item()
        norm += exact_double.square().sum().item()
    return (difference / norm) ** 0.5


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

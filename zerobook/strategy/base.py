"""What the rest of the project asks instead of branching on how a run is spread.

A `Strategy` owns the prepared model and optimizer. One optimizer step goes

    for micro-batch:
        with strategy.micro_batch(last=...): loss = ...; strategy.backward(loss)
    #  <- the seam: gradients are reduced and ready, nothing is applied yet
    norm = strategy.apply(learning_rate)

under every strategy, DeepSpeed included. Tensors of the training state are read and written
whole, by parameter name, one at a time (`get_tensor`, `set_tensor`): that is what makes a
checkpoint independent of the strategy that wrote it. These calls are collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from zerobook.strategy.norm import total_norm
from zerobook.strategy.pieces import Piece, Read
from zerobook.strategy.ranks import Ranks
from zerobook.strategy.replicas import Replicas, differing
from zerobook.training.optimizer import OptimizerSpec, optimizer_spec

if TYPE_CHECKING:
    from accelerate import Accelerator

    from zerobook.config import RecipeConfig
    from zerobook.resolve import LaunchPlan

_WRAPPERS = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.")
_SPLIT = 1 << 18
"""Numbers; smaller tensors are not worth writing in parts."""


class Strategy(Ranks):
    """Common half of every strategy; the subclasses below hold what differs."""

    shards_parameters = False
    """Each rank holds a part of the weights only."""
    generation_in_step = False
    """``generate`` gathers weights, so all ranks must call it together (``synced_gpus=True``)."""
    owns_schedule = False
    """The strategy file brings a learning-rate schedule of its own."""

    _applied: torch.Tensor | int = 0
    """Steps taken, for an optimizer that does not count its own."""

    def __init__(self, accelerator: Accelerator, plan: LaunchPlan):
        super().__init__(accelerator)
        self.plan = plan
        self.model: nn.Module = None  # type: ignore[assignment]
        self.optimizer: Any = None
        self.max_grad_norm = 0.0
        self.optimizer_spec: OptimizerSpec = optimizer_spec(plan.optimizer)
        self.loaded_dtypes: dict[str, torch.dtype] = {}
        """of each weight as the model was loaded, by name"""
        self._loaded_buffers: dict[str, torch.Tensor] = {}
        self._unscaled = False
        self._skips_on_device = self.optimizer_spec.skips_nonfinite
        if accelerator.num_processes != plan.world_size:
            raise RuntimeError(
                f"accelerate formed {accelerator.num_processes} process(es) where the launcher started "
                f"{plan.world_size}; every rank would read all the data"
            )

    def differing_replicas(self) -> Replicas | None:
        """Where every rank holds all weights: do all hold the same? None where they do. Collective."""
        if self.world_size == 1 or self.shards_parameters:
            return None
        named = [(unwrapped_name(name), parameter) for name, parameter in self.model.named_parameters()]
        return differing(self, named)

    # --- training
    def prepare(self, model: nn.Module, config: RecipeConfig, total_steps: int) -> None:
        """Make the optimizer and spread it and the model.

        Args:
            model: with ``requires_grad`` on what is trained.
            config: the optimizer's settings.
            total_steps: optimizer steps of the whole run, for a schedule that the strategy owns.
        """
        self._remember(model)
        self.max_grad_norm = config.max_grad_norm
        # What is trained is its own master: in half precision, small updates would round to nothing.
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        self.model, self.optimizer = self._spread(model, self._build_optimizer(model, config))

    def _spread(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, Any]:
        """Return the prepared model and optimizer."""
        return self.accelerator.prepare(model, optimizer)

    def _remember(self, model: nn.Module) -> None:
        """Keep dtypes and buffers as the model was loaded; call it before anything is cast."""
        self.loaded_dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
        self._loaded_buffers = {
            name: buffer.detach().to("cpu", copy=True) for name, buffer in persistent_buffers(model) if not buffer.is_meta
        }

    def _build_optimizer(self, model: nn.Module, config: RecipeConfig) -> torch.optim.Optimizer:
        optimizer = self.optimizer_spec.build(self._groups(model, config.weight_decay), config)
        if self.plan.offload_optimizer != "none" and self._skips_on_device:
            # Otherwise the scaler hands over a copy of its flag that may not have arrived from the GPU yet. With False, the
            # scaler reads the flag itself and skips the step.
            optimizer._step_supports_amp_scaling = False
        return optimizer

    def _groups(self, model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
        return parameter_groups(model, weight_decay, self.shape)

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Around one micro-batch's forward *and* backward; ranks reduce their gradients in the ``last`` of a step only.

        Both belong inside: DDP decides in its forward whether the backward after it will reduce.
        """
        self.accelerator.gradient_state._set_sync_gradients(last)
        with nullcontext() if last else self._accumulating():
            yield

    def _accumulating(self) -> AbstractContextManager[None]:
        """Keeps gradients on their ranks, where the strategy can."""
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate gradients of ``loss``, inside `micro_batch`.

        Args:
            loss: scalar; this rank's sum over supervised tokens divided by their *global* count,
                over all ranks and micro-batches of the step. The gradient of the step is then the sum of
                all such losses' gradients, whatever the split.
        """
        # Data parallelism averages over ranks and accelerate divides by the accumulation; the loss is a sum.
        self.accelerator.backward(loss * (self.world_size * self.accelerator.gradient_accumulation_steps))

    def gradient_norm(self) -> torch.Tensor:
        """Global 2-norm of the gradients, at the seam; unclipped. Collective. Changes nothing that `apply` would see."""
        self._unscale()
        return total_norm([p.grad for p in self.model.parameters() if p.grad is not None])

    def _unscale(self) -> None:
        """Take fp16's loss scale out of the gradients; a second time in a step would be an error."""
        if not self._unscaled:
            self.accelerator.unscale_gradients()
            self._unscaled = True

    def apply(self, learning_rate: float) -> torch.Tensor | float:
        """Clip, step, and drop the gradients. Where the norm is not finite, nothing is changed and no step is counted.

        An optimizer that cannot skip a step on the device makes the host wait for the norm in every step.

        Args:
            learning_rate: the rate of this step. It does not change a schedule that the strategy owns.

        Returns:
            The global gradient norm before clipping, maybe still on the device: reading it
            as a float waits for the device, so do that at log points only.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        norm = self.gradient_norm()
        torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), self.max_grad_norm or float("inf"), norm)
        finite = torch.isfinite(norm)
        if self._skips_on_device:
            # The flag stays on the device, so the host need not wait. fp16's scaler replaces it with its own.
            self._torch_optimizer().found_inf = (~finite).float()
            self.optimizer.step()
        elif self.accelerator.scaler is not None or finite.item():  # the scaler looks, and waits, by itself
            self.optimizer.step()
        self._applied = self._applied + finite.int()
        self._unscaled = False
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def inference(self) -> AbstractContextManager[None]:
        """Return a context in which parts of the model run in the precision of its ``forward`` when they are called directly.

        ``generate`` calls the encoder, or the base inside of adapters, without the prepared model's ``forward``. Here it needs
        nothing: DeepSpeed has cast the weights themselves, and FSDP2 casts what it gathers.
        """
        return nullcontext()

    def after_forwards(self) -> None:
        """Forwards without a backward are over (evaluation, generation): what they left gathered is given up. On every rank."""

    def learning_rate(self) -> float:
        """Return the rate set in the optimizer. A schedule that the strategy owns has set that of the next step."""
        return float(self.optimizer.param_groups[0]["lr"])

    # --- state, by parameter name
    @property
    def unwrapped(self) -> nn.Module:
        """The model as the recipe made it (its parameters may still be sharded)."""
        return self.accelerator.unwrap_model(self.model)

    def trainable(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) of every trained weight, in one order on all ranks and strategies."""
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                yield unwrapped_name(name), parameter

    def shape(self, parameter: nn.Parameter) -> torch.Size:
        """The whole parameter's shape, also where this rank holds a part."""
        return parameter.shape

    def _torch_optimizer(self) -> torch.optim.Optimizer:
        inner = self.optimizer
        while hasattr(inner, "optimizer"):
            inner = inner.optimizer
        return inner

    def _state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        return self._torch_optimizer().state[parameter]

    def initialising_whole(self) -> AbstractContextManager[None]:
        """Models made inside hold whole weights on this process, whatever sharding would do to them."""
        return nullcontext()

    def materialise_optimizer(self) -> None:
        """Create the state that the optimizer otherwise creates at its first step, as zeros."""
        for _, parameter in self.trainable():
            self._init_state(self._torch_optimizer(), parameter)

    def _init_state(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
        if not optimizer.state[parameter]:
            self.optimizer_spec.init_state(optimizer, parameter)

    def state_shapes(self, parameter: nn.Parameter) -> dict[str, torch.Size]:
        """Return name -> shape of the state that the optimizer keeps for a weight, whole."""
        return self.optimizer_spec.state_shapes(self.shape(parameter))

    def get_tensor(self, parameter: nn.Parameter, key: str | None = None) -> torch.Tensor:
        """The whole fp32 weight (``key`` None) or optimizer state, such as ``exp_avg``. Collective.

        Peak memory is one whole tensor per rank.
        """
        return whole(self._tensor(parameter, key).detach()).float()

    def pieces(self) -> Iterator[Piece]:
        """This rank's share of all weights and optimizer state, so that all ranks together give each number once.

        Nothing is sent between ranks. Values may be live: they hold until the next piece is asked for.
        """
        for index, (name, parameter) in enumerate(self.trainable()):
            for key in (None, *self.state_shapes(parameter)):
                found = self._piece(index, parameter, key)
                if found is not None and found[1].numel():
                    yield Piece(name, key, *found)

    def _piece(self, index: int, parameter: nn.Parameter, key: str | None) -> tuple[tuple[int, ...], torch.Tensor] | None:
        """``offset`` and ``values`` of the `Piece` that this rank writes; None where it writes nothing.

        ``index`` counts the parameters. Here, where every rank holds everything, they share the work.
        """
        flat = self._tensor(parameter, key).detach().reshape(-1)
        if flat.numel() < _SPLIT:
            return ((0,), flat) if index % self.world_size == self.rank else None
        part = -(-flat.numel() // self.world_size)
        start = min(part * self.rank, flat.numel())
        return (start,), flat[start : start + part]

    def restore(self, parameter: nn.Parameter, key: str | None, read: Read) -> None:
        """Bring back a weight (``key`` None) or optimizer state. Collective.

        Args:
            read: of the tensor in the checkpoint. Each rank calls it for what it needs alone; what all need is read by rank 0
                and sent.
        """
        with torch.no_grad():
            tensor = self._tensor(parameter, key)
            shape = self.shape(parameter) if key is None else self.state_shapes(parameter)[key]
            tensor.copy_(self._read_by_main(torch.Size(shape), read))

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return copies of the `persistent_buffers` on the CPU, in the dtypes they were loaded in.

        DeepSpeed casts floating buffers to its compute dtype. A buffer that is still its loaded value, rounded to that dtype,
        is returned as it was loaded.
        """
        found = {}
        for name, buffer in persistent_buffers(self.unwrapped):
            live = buffer.detach().to("cpu", copy=True).contiguous()
            loaded = self._loaded_buffers.get(name)
            if loaded is not None and loaded.dtype != live.dtype:
                unchanged = torch.equal(loaded.to(live.dtype), live)
                live = loaded.clone() if unchanged else live.to(loaded.dtype)
            found[name] = live
        return found

    def restore_buffers(self, values: dict[str, torch.Tensor]) -> None:
        """Set the buffers of this rank to what `buffers` returned."""
        with torch.no_grad():
            for name, buffer in persistent_buffers(self.unwrapped):
                buffer.copy_(values[name])
                self._loaded_buffers[name] = values[name]

    def _tensor(self, parameter: nn.Parameter, key: str | None) -> torch.Tensor:
        return parameter if key is None else self._state_of(parameter)[key]

    def _read_by_main(self, shape: torch.Size, read: Read) -> torch.Tensor:
        """The whole tensor of ``shape``, on every rank's device."""
        if self.is_main:
            value = read(0, shape.numel()).view(shape).to(self.device)
        else:
            value = torch.empty(shape, dtype=torch.float32, device=self.device)
        if self.world_size > 1:
            dist.broadcast(value, src=0)
        return value

    def _states(self) -> Iterable[dict[str, Any]]:
        return self._torch_optimizer().state.values()

    def optimizer_steps(self) -> int:
        """Steps that the optimizer has taken, such as the exponent of AdamW's bias correction; 0 before the first."""
        counted = self.optimizer_spec.get_step(self._torch_optimizer())
        return int(self._applied) if counted is None else counted

    def set_optimizer_steps(self, steps: int) -> None:
        self._applied = steps
        self.optimizer_spec.set_step(self._torch_optimizer(), steps)

    def scaler_state(self) -> dict[str, Any] | None:
        """The fp16 loss scaler's ``kind``, ``scale`` and whole ``state``, or None where no loss is scaled."""
        scaler = self.accelerator.scaler
        if scaler is None:
            return None
        return {"kind": type(scaler).__name__, "scale": scaler.get_scale(), "state": scaler.state_dict()}

    def load_scaler_state(self, saved: dict[str, Any] | None) -> None:
        """Take over what `scaler_state` gave; of another kind of scaler the scale alone."""
        scaler = self.accelerator.scaler
        if saved and scaler is not None:
            same = saved["kind"] == type(scaler).__name__
            scaler.load_state_dict(saved["state"] if same else scaler.state_dict() | {"scale": saved["scale"]})

    def set_schedule_step(self, step: int) -> None:
        """Continue a schedule that the strategy owns after ``step`` applied steps; those skipped for an overflow are none."""

    # --- memory
    def memory(self) -> dict[str, int]:
        """Bytes this rank holds now, counted from live tensors, each storage once.

        ``parameters``, ``gradients`` (at the seam; 0 elsewhere), and ``optimizer`` (fp32 masters
        and state). On every device together.
        """
        return {name: bytes(tensors) for name, tensors in self.held().items()}

    def held(self) -> dict[str, list[torch.Tensor]]:
        """The live tensors that `memory` counts, by the same names. Some may share storages."""
        parameters = list(self.model.parameters())
        return {
            "parameters": [p.data for p in parameters],
            "gradients": [p.grad for p in parameters if p.grad is not None],
            "optimizer": [t for state in self._states() for t in state.values() if isinstance(t, torch.Tensor)],
        }

    def describe(self) -> dict[str, Any]:
        """Facts read from the live objects, not from the plan or the files: what really runs.

        ``strategy`` is worded as `LaunchPlan.name`; ``wrapper`` is the class around the model, or none; ``masters`` is the
        number of weights, as elements, that this rank's optimizer steps and that are in memory now.
        """
        trained = [p for _, p in self.trainable()]
        wrapper = "none" if self.model is self.unwrapped else type(self.model).__name__
        return {"strategy": {"none": "one process", "DistributedDataParallel": "DDP"}.get(wrapper, wrapper),
                "wrapper": wrapper, "zero_stage": None, "world_size": self.world_size,
                "master_dtype": str(trained[0].dtype).removeprefix("torch."),
                "masters": sum(local(p).numel() for p in trained)}  # fmt: skip


class ReplicatedStrategy(Strategy):
    """One process, or DDP: every rank holds everything."""

    def inference(self) -> AbstractContextManager[None]:
        # The weights are fp32, and accelerate wraps autocast around ``forward`` alone. Around a whole call, each weight is
        # cast once; inside of ``forward``, all of them would be cast again for every token.
        return self.accelerator.autocast()

    def _accumulating(self) -> AbstractContextManager[None]:
        return self.accelerator.no_sync(self.model)


def parameter_groups(
    model: nn.Module, weight_decay: float, shape: Callable[[nn.Parameter], torch.Size] = lambda p: p.shape
) -> list[dict[str, Any]]:
    """The optimizer's groups of trained weights. Matrices alone decay: biases and norm gains are vectors, as in the
    transformers examples.

    Args:
        shape: of the whole weight, where a rank holds a part.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    if weight_decay == 0:
        return [{"params": trained, "weight_decay": 0.0}]
    groups = [
        {"params": [p for p in trained if len(shape(p)) >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if len(shape(p)) < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, buffer) of the buffers that a model's saved state holds, such as BART's ``final_logits_bias``.

    A model with adapters has none here: its base is frozen, and comes from the model that the config names.
    """
    if not hasattr(model, "peft_config"):
        for name, module, leaf in owners_of_buffers(model):
            yield unwrapped_name(name), getattr(module, leaf)


def owners_of_buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield (name, module that holds it, its name there) of each buffer that belongs to the state dict."""
    for path, module in model.named_modules():
        for leaf, buffer in module._buffers.items():
            if buffer is not None and leaf not in module._non_persistent_buffers_set:
                yield f"{path}.{leaf}" if path else leaf, module, leaf


def unwrapped_name(name: str) -> str:
    """A weight's name without those of the wrappers around its model."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "", 1) if name.startswith(wrapper) else name.replace("." + wrapper, ".")
    return name


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind ``tensors``; views of one buffer count once."""
    storages: dict[int, int] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())

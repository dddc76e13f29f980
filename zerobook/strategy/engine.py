"""One optimizer step: micro-batches, the reduced gradients, and the update."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from zerobook.strategy.norm import total_norm
from zerobook.strategy.state import TrainingState
from zerobook.strategy.token_split import TokenSplit
from zerobook.strategy.weights import parameter_groups
from zerobook.utils.dtypes import compute_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from zerobook.config import RecipeConfig

    class FlaggedOptimizer(torch.optim.Optimizer):
        """An optimizer with the attributes that torch's loss scaler sets. ``found_inf`` is a tensor on the device."""

        found_inf: torch.Tensor
        _step_supports_amp_scaling: bool


class Engine(TrainingState):
    """Makes the optimizer, distributes it and the model, and takes the optimizer steps."""

    max_grad_norm: float
    token_split: TokenSplit | None = None
    """The split of rows among processes; None if each process computes whole rows. `prepare` sets it."""
    # The gradients of this step have been divided by fp16's loss scale.
    _unscaled = False
    # The optimizer reads on the device whether it has to skip a step, so the host does not wait for the norm.
    _skips_on_device: bool

    def prepare(self, model: nn.Module, config: RecipeConfig, total_steps: int) -> None:
        """Make the optimizer, and distribute it and the model.

        Args:
            model: with ``requires_grad`` on the trained weights.
            config: the optimizer's settings.
            total_steps: optimizer steps of the complete run, for a schedule that the strategy owns.
        """
        # Record the dtypes of the loaded model before weights are cast. Checkpoints and the saved model need them.
        self._record_loaded(model)
        self.max_grad_norm = config.max_grad_norm
        # Trained weights are in fp32, since small updates of half-precision weights would be lost by rounding.
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.dtype != torch.float32:
                parameter.data = self._cast(parameter.data, torch.float32)
        self.model, self.optimizer = self._distribute(model, self._build_optimizer(model, config))

    def prepare_frozen(self, model: nn.Module) -> nn.Module:
        """Distribute a second model, which is not trained, and return it prepared. Collective. Call it after `prepare`.

        Checkpoints and the saved model do not hold it.
        """
        model.requires_grad_(requires_grad=False)
        model.eval()
        return self._distribute_frozen(model)

    # Distribute a frozen model, and return it prepared.
    def _distribute_frozen(self, model: nn.Module) -> nn.Module:
        # Keep the dtypes in which its weights were loaded, since autocast computes some layers in fp32, as in the trained
        # model.
        return self.accelerator.prepare_model(model, evaluation_mode=True)

    # Subclasses may cast without reading the numbers.
    def _cast(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return weight.to(dtype)

    def _cast_frozen(self, model: nn.Module) -> None:
        """Cast a frozen model's weights to the dtype that the run computes in. Buffers, such as rotary frequencies, stay."""
        dtype = compute_dtype(self.plan.precision)
        for parameter in filter(torch.is_floating_point, model.parameters()):
            # Quantised weights hold packed numbers, which cannot be cast.
            if hasattr(parameter, "quant_state"):
                continue
            parameter.data = self._cast(parameter.data, dtype)

    def prepare_to_load(self, new_model: Callable[[], nn.Module]) -> None:
        """Adapt the strategy's settings to a model before it is loaded.

        Args:
            new_model: makes a model of the same config. Call it on the meta device, where the model needs no memory.
        """

    def load(self, load_model: Callable[[dict[str, Any]], PreTrainedModel], options: dict[str, Any]) -> PreTrainedModel:
        """Load a model as this strategy needs it before `prepare`. Collective.

        Args:
            load_model: calls ``from_pretrained`` with the options that it gets.
            options: the options that the recipe chose, among them ``dtype`` and ``config``.
        """
        return load_model(options)

    def _distribute(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return the prepared model and optimizer."""
        return self.accelerator.prepare(model, optimizer)

    def _build_optimizer(self, model: nn.Module, config: RecipeConfig) -> torch.optim.Optimizer:
        optimizer = self.optimizer_spec.build(self._parameter_groups(model, config.weight_decay), config)
        if self.plan.offload_optimizer != "none" and self._skips_on_device:
            # With True, the scaler would give the optimizer a copy of its flag that may not have arrived from the GPU yet. With
            # False, the scaler reads the flag itself and skips the step.
            cast("FlaggedOptimizer", optimizer)._step_supports_amp_scaling = False
        return optimizer

    # Return the optimizer's groups of trained weights, see `parameter_groups`.
    def _parameter_groups(self, model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
        return parameter_groups(model, weight_decay, self.shape)

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """Return a context for one micro-batch's forward and backward pass.

        Both passes must be inside: DDP decides in the forward pass whether the backward pass reduces gradients.

        Args:
            last: the micro-batch is the last one of its step. Only then are gradients reduced.
        """
        self.accelerator.gradient_state._set_sync_gradients(last)
        return nullcontext() if last else self._accumulating()

    def _accumulating(self) -> AbstractContextManager[None]:
        """Return a context in which gradients are not reduced, if the strategy can do so."""
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate gradients of ``loss``, inside `micro_batch`.

        Args:
            loss: scalar; the objective's loss, summed over this rank's rows and divided by the *global* sum of loss weights,
                over all ranks and micro-batches of the step. The gradient of the step is the sum of the gradients of all these
                losses, whatever the rows of each rank and micro-batch.
        """
        # The gradients have to be added. Data parallelism averages them over the ranks, and accelerate divides the loss by the
        # accumulation, so multiply the loss by both numbers.
        factor = self.mesh.token_parallel_size * self.accelerator.gradient_accumulation_steps
        with self.split_attention():
            # A factor of 1 would only add a node to the graph.
            if factor != 1:
                loss = loss * factor
            self.accelerator.backward(loss)

    def split_tokens(self, batch: dict[str, Any]) -> AbstractContextManager[dict[str, Any]]:
        """Return a context for the forward pass of a batch. It yields this rank's tokens: all, unless ranks share rows.

        Args:
            batch: complete rows, the same on all ranks of a group.
        """
        return nullcontext(batch) if self.token_split is None else _split_batch(self.token_split, batch)

    def split_attention(self) -> AbstractContextManager[None]:
        """Return a context for the backward pass, which may compute attention again."""
        return nullcontext() if self.token_split is None else self.token_split.attention()

    def gradient_norm(self) -> torch.Tensor:
        """Return the global 2-norm of the gradients, before clipping. Collective.

        Call it after the last backward pass of a step and before `optimizer_step`, which it does not affect.
        """
        self._unscale()
        # Take the trained weights from the optimizer's groups: a pass through all modules of the model takes longer.
        gradients = []
        for group in self.optimizer.param_groups:
            gradients += [parameter.grad for parameter in group["params"] if parameter.grad is not None]
        return total_norm(gradients)

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, this rank's part of the gradient) of every trained weight, before clipping. No collective.

        Call it after the last backward pass of a step and before `optimizer_step`. Names come in the same order on every rank.
        All ranks' parts together hold each element once, so the sum of their squares over all ranks is the square of
        `gradient_norm`, under every strategy. A part may be empty or in host memory. It is valid until the next one is
        yielded, and must not be changed.
        """
        self._unscale()
        for index, (name, parameter) in enumerate(self.trainable()):
            gradient = self._gradient(index, parameter)
            yield name, torch.empty(0) if gradient is None else gradient.detach().reshape(-1)

    def _gradient(self, index: int, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return this rank's part of a weight's gradient; None if it has none.

        In this class every rank holds all gradients, so each gradient counts as the part of one rank, in turn.

        Args:
            index: the weight's position in `trainable`.
        """
        return parameter.grad if index % self.mesh.world_size == self.mesh.rank else None

    def _unscale(self) -> None:
        """Divide the gradients by fp16's loss scale, at most once per step."""
        if not self._unscaled:
            self.accelerator.unscale_gradients()
            self._unscaled = True

    def optimizer_step(self, learning_rate: float) -> torch.Tensor | float:
        """Clip the gradients, update the weights, and drop the gradients.

        If the norm is not finite, no weight is changed and no step is counted. An optimizer that cannot skip a step on the
        device makes the host wait for the norm in every step.

        Args:
            learning_rate: the rate of this step. It does not change a schedule that the strategy owns.

        Returns:
            The global gradient norm before clipping. It may be a tensor on the device: reading it as a float waits for the
            device, so do that at log points only.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        norm = self.gradient_norm()
        # Each group is clipped by the norm of all groups together. A maximum of 0 means that gradients are not clipped.
        for group in self.optimizer.param_groups:
            torch.nn.utils.clip_grads_with_norm_(group["params"], self.max_grad_norm or float("inf"), norm)
        is_finite = torch.isfinite(norm)
        # With fp16, the step goes through accelerate's wrapper, which calls the scaler. Without a scaler, torch's optimizer is
        # called directly, since the wrapper would search the import path for a library in each step.
        has_scaler = self.accelerator.scaler is not None
        optimizer = self.optimizer if has_scaler else self._torch_optimizer()
        if self._skips_on_device:
            # The flag stays on the device, so the host does not wait. fp16's scaler replaces it with its own flag.
            cast("FlaggedOptimizer", self._torch_optimizer()).found_inf = (~is_finite).float()
            optimizer.step()
        elif has_scaler or is_finite.item():
            # A scaler itself checks the gradients, and waits for the device.
            optimizer.step()
        # The count becomes a tensor on the device, so that the host does not wait for it.
        self._applied = self._applied + is_finite
        self._unscaled = False
        optimizer.zero_grad(set_to_none=True)
        return norm

    def inference(self) -> AbstractContextManager[None]:
        """Return a context in which parts of the model run in the precision of its ``forward`` when they are called directly.

        ``generate`` calls the encoder, or the base inside of adapters, without the prepared model's ``forward``. The default
        does nothing: DeepSpeed has cast the weights themselves, and FSDP2 casts what it gathers.
        """
        return nullcontext()

    def learning_rate(self) -> float:
        """Return the rate set in the optimizer. Under a schedule that the strategy owns, it is the next step's rate."""
        return float(self.optimizer.param_groups[0]["lr"])


# Return a context that yields this rank's tokens of a batch. In it, attention covers complete rows.
@contextmanager
def _split_batch(split: TokenSplit, batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
    tokens = split.cut(batch)
    with split.attention(len(tokens["input_ids"])):
        yield tokens

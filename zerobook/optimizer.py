"""Optimizers, with the properties that strategies, checkpoints and the planner need.

``--optimizer`` names one of `OPTIMIZERS`, or a class in a user's file as ``FILE.py:Class``. This module imports no large
library.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import ceil, prod
from typing import TYPE_CHECKING, Any, ClassVar, cast

from zerobook.errors import ConfigError
from zerobook.utils.nearest import nearest_value
from zerobook.utils.user_code import load_class

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from zerobook.config import RecipeConfig
    from zerobook.config_sources import ConfigSources


class OptimizerSpec(ABC):
    """An optimizer, and the state that it keeps for each weight.

    State tensors are fp32 and begin as zeros. They are stored by name in ``optimizer.state[weight]``, where a checkpoint
    reads and writes them. An optimizer that stores them otherwise overrides `get_state`, `set_state` and `held_bytes`.
    """

    elementwise: ClassVar[bool] = False
    """True if each element of a weight is updated from its own gradient and state alone, and the state has the weight's shape.
    Only then is the optimizer correct under DeepSpeed, which steps flat parts of weights, and FSDP2, which steps some rows."""
    skips_nonfinite: ClassVar[bool] = False
    """True if the step reads ``optimizer.found_inf``, a flag on the device, and changes nothing if the flag is 1. If False, the
    host decides, and waits for the device in every step."""
    step_bytes: ClassVar[int] = 0
    """Bytes of the step count, if it is kept in a tensor for each weight; 0 otherwise."""

    @abstractmethod
    def build(self, groups: list[dict[str, Any]], config: RecipeConfig) -> torch.optim.Optimizer:
        """Return the optimizer of the parameter ``groups``, which hold ``params`` and ``weight_decay`` each.

        The learning rate is set before every step, as ``lr`` of each group.
        """

    @abstractmethod
    def state_shapes(self, shape: torch.Size) -> dict[str, torch.Size]:
        """Return name -> shape of the tensors kept for a weight of ``shape``, in the order in which they are written."""

    def init_state(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
        """Create the state of ``parameter``, which has none yet, as the first step would: zeros.

        Override it if ``step`` creates the state and its step count only for a weight whose state is empty. After this method
        the state is not empty, so the override has to create the count as well.
        """
        import torch

        for key, shape in self.state_shapes(parameter.shape).items():
            if tuple(shape) == tuple(parameter.shape):
                # A DTensor stays one, with the parameter's shards.
                zeros = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            else:
                zeros = parameter.new_zeros(shape)
            optimizer.state[parameter][key] = zeros.detach()

    def get_state(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor, key: str) -> torch.Tensor:
        """Return the state tensor ``key`` of ``parameter`` in fp32, for a checkpoint."""
        return optimizer.state[parameter][key]

    def set_state(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor, key: str, value: torch.Tensor) -> None:
        """Set what `get_state` returns to ``value``. Called in the order of `state_shapes`."""
        optimizer.state[parameter][key].copy_(value)

    def held_bytes(self, shapes: Iterable[tuple[int, ...]]) -> int:
        """Return the bytes of state in memory for weights of ``shapes``, without step counts."""
        return 4 * state_numbers(self, shapes)

    def get_step(self, optimizer: torch.optim.Optimizer) -> int | None:
        """Return the number of steps that the optimizer has counted, 0 before the first; None if it does not count."""
        return None

    def set_step(self, optimizer: torch.optim.Optimizer, n: int) -> None:
        """Set the optimizer's step count to ``n``. It is called when the state of every weight exists."""
        return None


class _Counting(OptimizerSpec):
    """An optimizer that counts its steps as ``step``, in the state of each weight or in the group."""

    step_bytes = 4

    def get_step(self, optimizer: torch.optim.Optimizer) -> int:
        for state in optimizer.state.values():
            if "step" in state:
                return int(state["step"])
        return int(optimizer.param_groups[0].get("step", 0))

    def set_step(self, optimizer: torch.optim.Optimizer, n: int) -> None:
        import torch

        for state in optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"].fill_(n)
            elif "step" in state:
                state["step"] = n
        for group in optimizer.param_groups:
            if "step" in group:
                group["step"] = n


class AdamW(_Counting):
    """torch's AdamW, fused. DeepSpeed uses its own if the state is offloaded or its JSON names one."""

    elementwise = True
    skips_nonfinite = True

    def build(self, groups: list[dict[str, Any]], config: RecipeConfig) -> torch.optim.Optimizer:
        import torch

        return torch.optim.AdamW(
            groups,
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_epsilon,
            weight_decay=config.weight_decay,
            # A fused step is skipped by a flag on the device, so the host need not wait. ``fused=False`` would also switch
            # torch's foreach kernels off.
            fused=True,
        )

    def state_shapes(self, shape: torch.Size) -> dict[str, torch.Size]:
        return {"exp_avg": shape, "exp_avg_sq": shape}

    def init_state(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
        import torch

        state = optimizer.state[parameter]
        # DeepSpeed's CPUAdam counts in a plain int and its FusedAdam in the group; torch's Adam in a tensor.
        if isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
            counts_on_device = optimizer.defaults.get("fused") or optimizer.defaults.get("capturable")
            device = parameter.device if counts_on_device else "cpu"
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
        elif "step" not in optimizer.param_groups[0]:
            state["step"] = 0
        super().init_state(optimizer, parameter)


class SGD(OptimizerSpec):
    """torch's SGD with momentum, fused. ``weight_decay`` is added to the gradient, as torch does."""

    elementwise = True
    skips_nonfinite = True

    def build(self, groups: list[dict[str, Any]], config: RecipeConfig) -> torch.optim.Optimizer:
        import torch

        class MomentumSGD(torch.optim.SGD):
            """SGD whose momentum begins as zeros, which gives the same steps.

            If a fused first step is skipped, torch leaves the buffers uninitialised.
            """

            def step(self, closure: Any = None) -> Any:
                for group in self.param_groups:
                    for parameter in group["params"]:
                        if parameter.grad is not None and "momentum_buffer" not in self.state[parameter]:
                            self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
                return super().step(closure)

        return MomentumSGD(groups, lr=config.learning_rate, momentum=config.momentum, fused=True)

    def state_shapes(self, shape: torch.Size) -> dict[str, torch.Size]:
        return {"momentum_buffer": shape}


class Adafactor(_Counting):
    """torch's Adafactor. It keeps means over rows and columns of a matrix, and each step waits for the device.

    The learning rate is the maximum of the relative step size, ``1 / sqrt(step)``.
    """

    def build(self, groups: list[dict[str, Any]], config: RecipeConfig) -> torch.optim.Optimizer:
        import torch

        return torch.optim.Adafactor(groups, lr=config.learning_rate, weight_decay=config.weight_decay)

    def state_shapes(self, shape: torch.Size) -> dict[str, torch.Size]:
        if len(shape) < 2:
            return {"variance": shape}
        # The planner passes plain tuples, and gets plain tuples.
        size = type(shape)
        return {"row_var": size((*shape[:-1], 1)), "col_var": size((*shape[:-2], 1, shape[-1]))}

    def init_state(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
        import torch

        optimizer.state[parameter]["step"] = torch.zeros(())
        super().init_state(optimizer, parameter)


class PagedAdamW(_Counting):
    """bitsandbytes' AdamW. On a GPU, state that does not fit is paged to host RAM (Dettmers et al., 2023, section 3); on a
    CPU, bitsandbytes 0.50 does not page."""

    bits: ClassVar[int] = 32
    paged: ClassVar[bool] = True
    # The count is an integer of Python.
    step_bytes = 0

    def build(self, groups: list[dict[str, Any]], config: RecipeConfig) -> torch.optim.Optimizer:
        from bitsandbytes.optim import AdamW as BitsandbytesAdamW

        return BitsandbytesAdamW(
            groups,
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_epsilon,
            weight_decay=config.weight_decay,
            optim_bits=self.bits,
            is_paged=self.paged,
        )

    def state_shapes(self, shape: torch.Size) -> dict[str, torch.Size]:
        return {"exp_avg": shape, "exp_avg_sq": shape}

    def init_state(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
        # bitsandbytes creates the state of a parameter by its position among the groups.
        for group_index, group in enumerate(optimizer.param_groups):
            for index, member in enumerate(group["params"]):
                if member is parameter:
                    cast("Any", optimizer).init_state(group, parameter, group_index, index)

    def get_state(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor, key: str) -> torch.Tensor:
        return optimizer.state[parameter][_BITSANDBYTES[key]]

    def set_state(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor, key: str, value: torch.Tensor) -> None:
        self.get_state(optimizer, parameter, key).copy_(value)


class AdamW8bit(PagedAdamW):
    """bitsandbytes' AdamW with moments in 8 bits (Dettmers et al., 2022): each block of `BLOCK` numbers of a flattened weight
    has an fp32 scale, its largest absolute value. Weights under `SMALLEST_8BIT` numbers have fp32 moments.

    Checkpoints hold the moments in fp32 and the scales. With both, a resume computes the same 8-bit codes again.
    """

    bits = 8
    paged = False

    def state_shapes(self, shape: torch.Size) -> dict[str, torch.Size]:
        moments = super().state_shapes(shape)
        numbers = prod(shape)
        if numbers < SMALLEST_8BIT:
            return moments
        # The planner passes plain tuples, and gets plain tuples.
        blocks = type(shape)((ceil(numbers / BLOCK),))
        return {"exp_avg_scale": blocks, "exp_avg_sq_scale": blocks, **moments}

    def get_state(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor, key: str) -> torch.Tensor:
        import torch

        state = super().get_state(optimizer, parameter, key)
        if state.dtype != torch.uint8:
            return state
        from bitsandbytes.functional import dequantize_blockwise

        values, scale = self._values_and_scale(optimizer, parameter, key)
        # Paged state may lie in host memory.
        return dequantize_blockwise(state.to(scale.device), absmax=scale, code=values, blocksize=BLOCK)

    def set_state(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor, key: str, value: torch.Tensor) -> None:
        import torch

        state = super().get_state(optimizer, parameter, key)
        if state.dtype != torch.uint8:
            state.copy_(value)
            return
        # Quantise with the scales of the checkpoint. bitsandbytes would compute new ones, and they would become smaller: -1 is
        # not among its 256 values, so the largest number of a block loses a little if it is negative.
        values, scale = self._values_and_scale(optimizer, parameter, key)
        normalised = value.to(scale.device).flatten() / scale.repeat_interleave(BLOCK)[: value.numel()]
        # The code of a number is the index of the nearest value, which the midpoints between the values delimit. A block of
        # zeros has the scale 0, and 0 / 0 is nan.
        midpoints = (values[1:] + values[:-1]) / 2
        state.copy_(torch.bucketize(normalised.nan_to_num(0.0), midpoints).view(state.shape))

    def _values_and_scale(
        self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor, key: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the 256 values that an 8-bit code can stand for, ascending, and the scale of each block."""
        state = optimizer.state[parameter]
        # bitsandbytes keeps the values of the codes in ``state1`` as ``qmap1``.
        values = state[_BITSANDBYTES[key].replace("state", "qmap")]
        return values, state[_BITSANDBYTES[f"{key}_scale"]]

    def held_bytes(self, shapes: Iterable[tuple[int, ...]]) -> int:
        bytes_of_state = 0
        has_quantised = False
        for shape in shapes:
            numbers = prod(shape)
            if numbers < SMALLEST_8BIT:
                # Two moments in fp32.
                bytes_of_state += 2 * 4 * numbers
            else:
                # Two moments of a byte, and an fp32 scale for each block of both.
                bytes_of_state += 2 * numbers + 2 * 4 * ceil(numbers / BLOCK)
                has_quantised = True
        if has_quantised:
            # The 256 values of both 8-bit types in fp32, which all weights share.
            bytes_of_state += 2 * 4 * 256
        return bytes_of_state


class PagedAdamW8bit(AdamW8bit):
    """`AdamW8bit` whose state is paged as that of `PagedAdamW`."""

    paged = True


# Numbers that share a scale in bitsandbytes' 8-bit state.
BLOCK = 256
# Numbers of the smallest weight whose state bitsandbytes keeps in 8 bits.
SMALLEST_8BIT = 4096
# Key of a state tensor in checkpoints -> its key in bitsandbytes' optimizers.
_BITSANDBYTES = {"exp_avg": "state1", "exp_avg_sq": "state2", "exp_avg_scale": "absmax1", "exp_avg_sq_scale": "absmax2"}

# The optimizers that ``--optimizer`` knows by name.
OPTIMIZERS: dict[str, type[OptimizerSpec]] = {
    "adamw": AdamW,
    "sgd": SGD,
    "adafactor": Adafactor,
    "adamw_8bit": AdamW8bit,
    "paged_adamw": PagedAdamW,
    "paged_adamw_8bit": PagedAdamW8bit,
}

# Optimizer -> other optimizers whose checkpoints it can resume from, since they hold all of its state.
RESUMES = {
    "adamw": ("adamw_8bit", "paged_adamw", "paged_adamw_8bit"),
    "paged_adamw": ("adamw", "adamw_8bit", "paged_adamw_8bit"),
    "adamw_8bit": ("paged_adamw_8bit",),
    "paged_adamw_8bit": ("adamw_8bit",),
}

_ADAMS = ("adamw", "adamw_8bit", "paged_adamw", "paged_adamw_8bit")
# Config key -> the optimizers of `OPTIMIZERS` that read it. A class of the user may read any key.
SETTINGS = {"adam_beta1": _ADAMS, "adam_beta2": _ADAMS, "adam_epsilon": _ADAMS, "momentum": ("sgd",)}


def optimizer_spec(optimizer: str) -> OptimizerSpec:
    """Return the optimizer that ``--optimizer`` names.

    Args:
        optimizer: a name in `OPTIMIZERS`, or ``FILE.py:Class``. The file is run.

    Raises:
        ConfigError: there is no such optimizer, file or class.
    """
    if optimizer in OPTIMIZERS:
        return OPTIMIZERS[optimizer]()
    if ":" not in optimizer:
        raise ConfigError(
            f"optimizer: there is no optimizer {optimizer!r}. Take one of {', '.join(OPTIMIZERS)}, or your own as "
            f"FILE.py:Class.{nearest_value('optimizer', optimizer, OPTIMIZERS)}"
        )
    spec_class = load_class("optimizer", optimizer, OptimizerSpec)  # type: ignore[type-abstract]  # the base is abstract
    try:
        return spec_class()
    except TypeError as error:
        raise ConfigError(f"optimizer: {optimizer} is called without arguments, and that fails: {error}") from error


def optimizer_name(optimizer: str) -> str:
    """Return the optimizer's name in checkpoints: for ``FILE.py:Class`` the name of the class, else the name itself."""
    return optimizer.rpartition(":")[2]


def names_code_in_yaml(config: RecipeConfig, sources: ConfigSources) -> bool:
    """Return whether the optimizer is a class in somebody's file, and the recipe's YAML, not a flag, names it."""
    return config.optimizer not in OPTIMIZERS and sources.is_from_yaml("optimizer")


def unused_settings(optimizer: str, keys: Iterable[str]) -> list[str]:
    """Return a problem for each config key of ``keys`` that the optimizer does not read."""
    problems: list[str] = []
    if optimizer not in OPTIMIZERS:
        return problems
    for key in keys:
        readers = SETTINGS.get(key, (optimizer,))
        if optimizer not in readers:
            problems.append(
                f"{key}: it is a setting of {readers[0]}, and the optimizer is {optimizer}, which does not read it. Drop "
                f"{key}, or pass --optimizer {readers[0]}."
            )
    return problems


def state_numbers(spec: OptimizerSpec, shapes: Iterable[tuple[int, ...]]) -> int:
    """Return the number of elements of the optimizer's state for weights of ``shapes``, as a checkpoint holds it."""
    numbers = 0
    for shape in shapes:
        # The planner passes plain tuples, so that it need not import torch.
        state_shapes = spec.state_shapes(cast("torch.Size", shape))
        numbers += sum(prod(state_shape) for state_shape in state_shapes.values())
    return numbers


def explain_refusal(strategy: str, kind: str, offload: str, optimizer: str) -> str | None:
    """Return why a strategy cannot use an optimizer, and the way out; None if it can.

    Args:
        strategy: the strategy's name in messages.
        kind: of the strategy: ``single``, ``ddp``, ``deepspeed`` or ``fsdp``.
        offload: where the optimizer's state is kept: ``none``, ``cpu`` or ``nvme``.
        optimizer: the value of ``--optimizer``.

    Raises:
        ConfigError: there is no such optimizer.
    """
    if not optimizer_spec(optimizer).elementwise and kind in ("deepspeed", "fsdp"):
        sharding = "gives each process some rows of a weight"
        if kind == "deepspeed":
            sharding = "flattens weights and cuts them anywhere"
        advice = ""
        if optimizer not in OPTIMIZERS:
            advice = " If each number is updated from its own gradient and state, set elementwise = True."
        return (
            f"optimizer: {optimizer} needs whole weights, as for means over rows and columns or for blocks with one scale, and "
            f"{strategy} {sharding}. Launch with accelerate_configs/ddp.yaml, or pass --optimizer adamw or sgd.{advice}"
        )
    if offload == "nvme" and optimizer != "adamw":
        return (
            f"optimizer: {optimizer} was asked for, and {strategy} keeps the state on a disk, which works with adamw alone. "
            "Offload it to cpu (accelerate_configs/zero3_offload.yaml), or pass --optimizer adamw."
        )
    return None

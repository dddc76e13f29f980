"""LoRA adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from torch import nn

from zerobook.errors import ConfigError

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


def add_lora(
    model: PreTrainedModel,
    *,
    rank: int,
    alpha: float,
    dropout: float,
    targets: list[str],
    seed: int,
    revision: str = "main",
) -> PeftModel:
    """Freeze ``model`` and put adapters beside its ``targets``.

    Args:
        rank: inner size of the adapters.
        alpha: the update is weighed by ``alpha / rank``.
        dropout: before the adapters.
        targets: module names, or ``["all-linear"]`` for every linear layer but the output head.
        seed: of the adapters' initial weights, which are equal on every rank and under every strategy.
        revision: of the model on the hub. The saved adapter's config names the commit, or this where the commit is unknown.

    Raises:
        ConfigError: a target that the model does not have.
    """
    from accelerate.utils import set_seed
    from peft import LoraConfig, get_peft_model

    chosen = targets[0] if targets == ["all-linear"] else targets
    set_seed(seed)
    config = LoraConfig(
        r=rank, lora_alpha=cast("int", alpha), lora_dropout=dropout, target_modules=chosen, task_type="CAUSAL_LM"
    )
    try:
        adapted = get_peft_model(model, config, revision=getattr(model, "base_commit", None) or revision)
    except ValueError as error:
        linear = sorted({n.rsplit(".", 1)[-1] for n, m in model.named_modules() if isinstance(m, nn.Linear)})
        raise ConfigError(
            f"lora_target_modules: {targets} does not fit this model ({error}). Its linear layers: {', '.join(linear)}."
        ) from error
    return cast("PeftModel", adapted)

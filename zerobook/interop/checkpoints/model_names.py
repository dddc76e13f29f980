"""The names of a model's weights, in the orders in which trainers' optimizers number them. No weights are loaded."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerobook.errors import CheckpointError

ADAPTER_CONFIG = "adapter_config.json"


def make_empty_model(folder: Path) -> nn.Module:
    """Return the model of a folder without weights (on the meta device), with adapters if the folder holds an adapter.

    Raises:
        CheckpointError: there is no ``config.json``, or the code of its model is not in transformers.
    """
    import transformers
    from transformers import AutoConfig

    config_folder: Any = folder
    if (folder / ADAPTER_CONFIG).exists():
        from peft import PeftConfig

        adapter_config = PeftConfig.from_pretrained(str(folder))
        config_folder = adapter_config.base_model_name_or_path
    try:
        model_config = AutoConfig.from_pretrained(config_folder)
        model_class = getattr(transformers, model_config.architectures[0])
    except (OSError, ValueError, AttributeError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(
            f"{folder}: the config of its model cannot be read from {config_folder} ({reason}). Its optimizer numbers the "
            "weights, and only the model knows their names. Copy the model's config.json there, or for adapters let "
            f"base_model_name_or_path in {ADAPTER_CONFIG} name the base model's folder."
        ) from None
    with torch.device("meta"):
        model = model_class(model_config)
        # Make weights that share memory one parameter, as they are in the optimizer.
        model.tie_weights()
        # A folder without an adapter has the model's own config.
        if config_folder is folder:
            return model
        from peft import get_peft_model

        # Saved adapters are marked as not trainable.
        adapter_config.inference_mode = False
        return get_peft_model(model, adapter_config)


def list_weight_orders(model: nn.Module) -> Iterator[list[list[str]]]:
    """Yield the orders in which trainers may number the trained weights, each as groups of names.

    The first one is that of transformers' Trainer.
    """
    from transformers import Trainer

    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    decaying = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]  # it does not use the trainer
    matrices = {name for name, parameter in trained.items() if parameter.ndim >= 2}
    # The first group has weight decay, and the second has none. Trainer decays `decaying`, and other loops decay all matrices.
    for first_group in (decaying, matrices):
        yield [[name for name in trained if name in first_group], [name for name in trained if name not in first_group]]
    # Other loops have one group.
    yield [list(trained)]


def to_peft_name(name: str) -> str:
    """Return a weight's name in the files of PEFT, which leave out the name of the adapter, ``default``."""
    return name.replace(".modules_to_save.default.", ".").replace(".default.", ".").removesuffix(".default")

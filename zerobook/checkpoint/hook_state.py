"""The state of hooks in a checkpoint: tensors in pieces beside those of the optimizer, all other values in `HOOKS`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from zerobook.strategy import Strategy
from zerobook.strategy.swap import check_shards

HOOKS = "hooks.json"
"""Name of the hook -> ``values``, and the keys of its ``tensors``."""


@dataclass
class HookState:
    """The state of all hooks, as a checkpoint holds it."""

    values: dict[str, Any] = field(default_factory=dict)
    """content of `HOOKS`"""
    tensors: dict[str, Mapping[str, torch.Tensor]] = field(default_factory=dict)
    """key in the checkpoint -> name of a trained weight -> tensor like this rank's shard"""


def tensor_key(hook: str, key: str) -> str:
    """Return the key of a hook's tensors in the index: a weight's tensor is ``hooks.HOOK.KEY/PARAMETER``."""
    return f"hooks.{hook}.{key}"


def arrange(states: dict[str, dict[str, Any]], strategy: Strategy) -> HookState:
    """Return the states of hooks, by their names, for a checkpoint.

    Raises:
        TypeError: a value is neither JSON nor a dict of tensors.
        ValueError: tensors are not like the shards of the trained weights.
    """
    arranged = HookState()
    for hook, state in states.items():
        values = {}
        tensor_keys = []
        for key, value in state.items():
            if isinstance(value, Mapping) and value and all(isinstance(each, torch.Tensor) for each in value.values()):
                check_shards(strategy, value, f"state_dict of the hook {hook}, {key}")
                arranged.tensors[tensor_key(hook, key)] = value
                tensor_keys.append(key)
            else:
                values[key] = value
        try:
            # A copy: a save in the background is written later.
            values = json.loads(json.dumps(values))
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"state_dict of the hook {hook}: {error}. A value is what JSON can hold, or a dict with a tensor for each "
                "trained weight."
            ) from None
        arranged.values[hook] = {"values": values, "tensors": tensor_keys}
    return arranged

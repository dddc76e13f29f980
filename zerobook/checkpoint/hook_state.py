"""The state of hooks in a checkpoint: tensors in pieces beside those of the optimizer, all other values in `HOOKS`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from zerobook.strategy import Strategy
from zerobook.strategy.swap import check_shards

# File with the state of each hook by the hook's name: its ``values``, and the keys of its ``tensors``.
HOOKS = "hooks.json"


@dataclass
class HookState:
    """The state of all hooks, as a checkpoint holds it."""

    values: dict[str, Any] = field(default_factory=dict)
    """hook's name -> ``values``, and the keys of its ``tensors``: the content of `HOOKS`"""
    tensors: dict[str, Mapping[str, torch.Tensor]] = field(default_factory=dict)
    """`tensor_key` -> name of a trained weight -> tensor like this rank's shard"""


def tensor_key(hook: str, key: str) -> str:
    """Return the prefix of the names of a hook's tensors: the index calls one ``hooks.HOOK.KEY/PARAMETER``."""
    return f"hooks.{hook}.{key}"


def make_hook_state(states: dict[str, dict[str, Any]], strategy: Strategy) -> HookState:
    """Separate the tensors in the states of hooks from all other values.

    Args:
        states: hook's name -> what its ``state_dict`` returned.

    Raises:
        TypeError: a value is neither JSON nor a dict of tensors.
        ValueError: tensors are not like the shards of the trained weights.
    """
    hook_state = HookState()
    for hook, state in states.items():
        values = {}
        tensor_keys = []
        for key, value in state.items():
            # An empty dict has no tensors, and is a value.
            if isinstance(value, Mapping) and value and all(isinstance(item, torch.Tensor) for item in value.values()):
                check_shards(strategy, value, f"state_dict of the hook {hook}, {key}")
                hook_state.tensors[tensor_key(hook, key)] = value
                tensor_keys.append(key)
            else:
                values[key] = value
        try:
            # Copy the values: a save in the background writes them later, when the hook may have changed them.
            values = json.loads(json.dumps(values))
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"state_dict of the hook {hook}: {error}. A value is what JSON can hold, or a dict with a tensor for each "
                "trained weight."
            ) from None
        hook_state.values[hook] = {"values": values, "tensors": tensor_keys}
    return hook_state

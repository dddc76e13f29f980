"""Check, by a measurement on the model, that it computes the same logits for a row whose tokens are split among processes."""

import numpy as np
import torch

from zerobook.errors import ConfigError
from zerobook.models.isolation import draw_random_tokens
from zerobook.objective import Objective, with_targets
from zerobook.strategy import Strategy

# Tokens that each process has of the measured row.
_TOKENS = 16
# Largest difference that is taken for rounding, as a share of the logits, by the run's precision.
_ROUNDING = {"no": 1e-3, "bf16": 5e-2, "fp16": 5e-2}


def check_split(strategy: Strategy, objective: Objective) -> None:
    """Check that objective and model can work on a part of each row's tokens, if the strategy splits rows. Collective.

    Raises:
        ConfigError: the objective needs whole rows, or the model computes other logits for a split row.
    """
    if strategy.token_split is None:
        return
    size = strategy.token_split.size
    name = strategy.plan.name
    if not objective.splits_tokens(strategy.model):
        raise ConfigError(
            f"objective: {name} gives each of {size} processes a part of each row's tokens, and {type(objective).__name__} "
            "needs whole rows: it is not a plain sum over tokens, or adds the load-balancing loss (router_aux_loss_coef). "
            "Use a strategy file that does not split rows, or see splits_tokens in docs/how-to/custom_loss.md."
        )
    try:
        difference = _measure_difference(strategy)
    except torch.OutOfMemoryError:
        raise
    # Architectures raise different errors for arguments that they do not take.
    except Exception as error:
        reason = f"its forward pass fails on a part of a row ({type(error).__name__}: {error})"
    else:
        if difference <= _ROUNDING[strategy.plan.precision]:
            return
        reason = f"its logits for a split row differ from those for the whole row by {difference:.1e}"
    raise ConfigError(
        f"model: {name} splits rows among {size} processes, and {type(strategy.unwrapped).__name__} does not support that: "
        f"{reason}. Use a strategy file that does not split rows."
    )


@torch.no_grad()
def _measure_difference(strategy: Strategy) -> float:
    """Return how much a split row's logits differ from the complete row's, over all ranks. Collective.

    The root mean square of the difference is divided by that of the complete row's logits. Infinite if it is not finite.
    """
    assert strategy.token_split is not None
    model = strategy.model
    was_training = model.training
    tokens = draw_random_tokens(strategy, _TOKENS * strategy.token_split.size)
    ids = torch.as_tensor(tokens, device=strategy.device)[None]
    positions = torch.arange(ids.size(1), device=strategy.device)[None]
    # Dropout would differ between the two passes.
    model.eval()
    try:
        row_logits = model(input_ids=ids, position_ids=positions).logits.float()
        with strategy.split_tokens({"input_ids": ids, "labels": ids}) as piece:
            inputs, _ = with_targets(piece)
            logits = model(**inputs).logits.float()
        # The complete row's logits for the tokens that this process has of the split row.
        expected = row_logits[:, piece["position_ids"][0]]
        sums = torch.stack([(logits - expected).square().sum(), expected.square().sum()])
    finally:
        model.train(was_training)
        strategy.release_gathered_parameters()
    # All ranks decide by the sums over all ranks, so they decide the same. Collective.
    difference, size = strategy.sum_over_ranks(sums).tolist()
    if not np.isfinite(difference):
        return float("inf")
    return float(np.sqrt(difference / max(size, 1e-12)))

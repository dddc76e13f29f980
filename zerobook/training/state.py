"""The state of a run: its progress, its sample order and its learning rate."""

from collections.abc import Callable
from typing import Any

import torch

from zerobook.checkpoint.progress import Progress
from zerobook.config import RecipeConfig
from zerobook.data.batch_loader import BatchLayout, BatchLoader
from zerobook.data.prepare import PreparedData
from zerobook.data.sampler import rows_of
from zerobook.monitor.policy import compute_rate_share
from zerobook.training.recipe import Collator

# A position in the sample order that no run reaches.
_FOREVER = 2**62


class RunState:
    """State of a run that determines its next steps, besides weights and optimizer state.

    Args:
        progress: changed in place, at every step and by a rollback.
        pin_memory: batches are made in pinned memory, for a GPU.
    """

    def __init__(
        self,
        config: RecipeConfig,
        data: PreparedData,
        layout: BatchLayout,
        progress: Progress,
        collate: Collator,
        *,
        pin_memory: bool = False,
    ):
        self.config = config
        self.data = data
        self.layout = layout
        self.progress = progress
        self.collate = collate
        self._pin_memory = pin_memory
        self.loader: BatchLoader
        self.end_step: int
        """the step at which training ends"""
        self.build_loader()
        # Samples that are left out later lower `end_step`, and not this value.
        self.total_steps: int = self.end_step
        """length of the learning-rate schedule, in steps"""
        self.schedule: Callable[[int], float]
        """steps done -> scheduled rate of the next one"""
        self.earlier_losses: dict[int, float] = {}
        """step -> loss recorded earlier, for steps that are done again"""

    def build_loader(self) -> None:
        """Build the loader from the current position in the sample order, without the samples that are left out."""
        config = self.config
        progress = self.progress
        rows = self.data.train.without_samples(progress.skip_ranges)
        # If ``max_train_steps`` ends the run, the samples must not end before it.
        end = _FOREVER if config.max_train_steps else rows_of(config.num_train_epochs, len(rows))
        # Pass `OrderSettings` and not the config: a resumed run compares only these settings, so the order must depend on no
        # others. The datasets' weights, which are among them, are passed beside them, as a list in the order of the datasets.
        order = rows.order(config.order_settings, seed=progress.seed, weights=self.data.weights, passed=progress.stream)
        self.loader = BatchLoader(
            rows,
            order,
            self.layout,
            self.collate,
            cursor=progress.cursor,
            end=end,
            workers=config.dataloader_num_workers,
            pin_memory=self._pin_memory,
        )
        self.end_step = config.max_train_steps or progress.step + self.loader.steps()

    def drop_loader(self) -> None:
        """Release the loader, its processes and its memory. `build_loader` makes a new one."""
        del self.loader

    def rate(self) -> float:
        """Return the next step's learning rate: the scheduled rate, lowered by the cuts."""
        step = self.progress.step
        return self.schedule(step) * compute_rate_share(self.progress.rate_cuts, step)

    def expected_next_step(self) -> dict[str, Any]:
        """Return the inputs of the next step by name. They are recorded in a checkpoint, and compared after it was loaded."""
        generator = torch.Generator().manual_seed(step_seed(self.progress.seed, self.progress.step, 0))
        return {
            "learning rate": self.rate(),
            # Eight samples are enough to notice another order.
            "samples": self.loader.order.take(self.progress.cursor, 8, self.loader.end)[0].tolist(),
            "random numbers": torch.randint(2**31, (4,), generator=generator).tolist(),
        }

    def compare_next_step(self, recorded: dict[str, Any]) -> tuple[list[str], dict[str, list[Any]]]:
        """Compare the inputs of the next step with those that a checkpoint records.

        Args:
            recorded: what `expected_next_step` returned at the save; empty if the checkpoint has no record.

        Returns:
            (names of the inputs that agree, name -> [recorded, expected] of those that differ).
        """
        expected = self.expected_next_step()
        agreeing = []
        differing = {}
        for name, value in recorded.items():
            if expected.get(name) == value:
                agreeing.append(name)
            else:
                differing[name] = [value, expected.get(name)]
        return sorted(agreeing), differing


def step_seed(seed: int, step: int, rank: int) -> int:
    """Return a seed for a rank in a step. The factors, those of SplitMix64, make the seeds of adjacent steps very different."""
    return (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + rank * 0x94D049BB133111EB) % 2**63


def seed_generators(seed: int) -> None:
    """Seed torch's generators, as `torch.manual_seed` does.

    While CUDA is not in use, `torch.manual_seed` is slow: each call formats a stack trace, for the case that CUDA is started
    later and fails.
    """
    if torch.cuda.is_initialized():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)

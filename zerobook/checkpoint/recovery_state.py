"""The decisions about spikes, in a file of their own. A rollback restores a checkpoint, and must not undo these decisions."""

from __future__ import annotations

import json
from dataclasses import asdict, field
from pathlib import Path
from typing import Any

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from zerobook.errors import CheckpointError
from zerobook.utils.reading import read_json
from zerobook.utils.writing import write_whole

# Name of the file in the runlog's folder.
FILE = "recovery.json"


# Somebody may have changed the file, so unknown keys and values of other types are refused.
@dataclass(config=ConfigDict(extra="forbid"))
class RecoveryState:
    """Decisions about spikes by all attempts of a run so far. Rank 0 reads and writes them as ``runlog/recovery.json``.

    The runlog has events about the same decisions for people. A run does not read these events.
    """

    skip_ranges: list[list[int]] = field(default_factory=list)
    """[start, end) of sample ids left out"""
    rate_cuts: list[list[float]] = field(default_factory=list)
    """cuts of the learning rate, as in `zerobook.checkpoint.progress.Progress`"""
    policy: dict[str, Any] = field(default_factory=dict)
    """state of `zerobook.monitor.policy.RecoveryPolicy`"""
    proven: list[int] = field(default_factory=list)
    """steps of the checkpoints that were proven good and were not saved again since"""
    rollback_to: int | None = None
    """step of the checkpoint that a rollback returns to, from its decision to its end; None without a rollback"""
    redone: int = 0
    """steps that were done and abandoned"""
    counted_from: list[int] = field(default_factory=lambda: [0, 0])
    """[attempt, branch] of the runlog: ``redone`` has the abandoned steps that were logged before it, and none logged since"""

    @classmethod
    def read(cls, output_dir: str | Path) -> RecoveryState:
        """Return the decisions of earlier attempts; none if there is no file.

        Raises:
            CheckpointError: the file cannot be read, or holds values of other types.
        """
        file = Path(output_dir) / "runlog" / FILE
        try:
            return cls(**read_json(file))
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(
                f"{file}: it cannot be read ({error}). Remove it, and the run goes on without what was decided about earlier "
                "spikes since the checkpoint."
            ) from error

    def write(self, output_dir: str | Path) -> None:
        """Write the file, and flush it to disk."""
        folder = Path(output_dir) / "runlog"
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / FILE, json.dumps(asdict(self)), durable=True)

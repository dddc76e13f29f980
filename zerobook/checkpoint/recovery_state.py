"""The decisions about spikes, in a file of their own: they outlive the checkpoint that a run goes back to."""

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

FILE = "recovery.json"
"""File in the runlog's folder."""


# The file may have been changed by somebody else, so unknown keys and values of other types are refused.
@dataclass(config=ConfigDict(extra="forbid"))
class RecoveryState:
    """Decisions of the attempts of a run so far, in ``runlog/recovery.json``. Rank 0 reads and writes it.

    The runlog's events tell the same to people, and nothing is read back out of them.
    """

    skip_ranges: list[list[int]] = field(default_factory=list)
    """[start, end) of sample ids left out"""
    rate_cuts: list[list[float]] = field(default_factory=list)
    """cuts of the learning rate, as in `zerobook.checkpoint.progress.Progress`"""
    policy: dict[str, Any] = field(default_factory=dict)
    """state of `zerobook.monitor.policy.RecoveryPolicy`"""
    proven: list[int] = field(default_factory=list)
    """steps whose checkpoints, as they are now, were proven good"""
    rollback_to: int | None = None
    """step of the checkpoint of a rollback that has begun and not ended"""
    redone: int = 0
    """steps that were done and abandoned"""
    counted_from: list[int] = field(default_factory=lambda: [0, 0])
    """attempt and branch of the runlog from which on steps that are abandoned are not in ``redone`` yet"""

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
        """Write the file. It is on the disk when this returns."""
        folder = Path(output_dir) / "runlog"
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / FILE, json.dumps(asdict(self)), durable=True)

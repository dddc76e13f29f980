"""Find the checkpoint that ``--resume_from_checkpoint`` refers to. If there is none, the error says why."""

from dataclasses import dataclass
from pathlib import Path

from zerobook.checkpoint import store
from zerobook.errors import CheckpointError
from zerobook.utils.units import counted


@dataclass(frozen=True)
class Resolution:
    """The checkpoint to resume from, and the damaged checkpoints that were skipped in the search for it, each with the reason.

    ``checkpoint`` is None if a run has none yet, or if no resume was requested.
    """

    checkpoint: Path | None
    skipped: dict[Path, str]


def resolve_resume(output_dir: str | Path, request: str | None, *, thorough: bool = False) -> Resolution:
    """Return the checkpoint that ``--resume_from_checkpoint`` refers to.

    Args:
        request: what to resume from:

            - None: nothing.
            - ``auto``: the newest undamaged checkpoint under ``output_dir``; nothing if there are no checkpoints yet.
            - ``best``: the undamaged checkpoint under ``output_dir`` with the lowest held-out loss.
            - the folder of a checkpoint.
            - the folder of a run: its newest undamaged checkpoint.
        thorough: read every byte and compare it with its digest. Otherwise no tensors are read, which is cheap enough for
            every process.

    Raises:
        CheckpointError: in one of these cases:

            - the named checkpoint is damaged, or all checkpoints of the named run are.
            - ``output_dir`` has checkpoints of another run than the named one, be these damaged or abandoned.
            - ``auto``: there are checkpoints, and all of them are damaged or abandoned.
            - ``best``: no undamaged checkpoint was evaluated.
    """
    if request is None:
        return Resolution(None, {})
    if request in ("auto", "best"):
        return _resolve_in_run(output_dir, request, thorough)
    resolution = _resolve_path(output_dir, request, thorough)
    assert resolution.checkpoint is not None
    _require_same_run(resolution.checkpoint, output_dir)
    return resolution


def describe_unusable(output_dir: str | Path) -> str | None:
    """Return the error message for a folder without complete checkpoints, if it has damaged or abandoned ones; else None."""
    checkpoints = store.folder_of(output_dir)
    reasons = store.list_unreadable(checkpoints)
    if reasons:
        return _describe_unreadable(output_dir, reasons)
    abandoned = store.list_aside(checkpoints, "abandoned")
    if abandoned:
        return _describe_abandoned(output_dir, abandoned)
    return None


def _resolve_in_run(output_dir: str | Path, request: str, thorough: bool) -> Resolution:
    """Return the checkpoint under ``output_dir`` that ``auto`` or ``best`` refers to."""
    checkpoints = store.folder_of(output_dir)
    candidates = store.list_candidates(checkpoints)
    if request == "best":
        candidates = store.sort_by_loss(candidates)
    resolution = _find_last_undamaged(candidates, thorough)
    if resolution.checkpoint is not None:
        return resolution
    reasons = resolution.skipped
    if request == "auto":
        reasons = reasons | store.list_set_aside_unreadable(checkpoints)
    elif not reasons:
        raise CheckpointError(
            f"{output_dir}: no complete checkpoint there was saved at a step that was evaluated, so none is the best. Let "
            "--save_steps be auto or a multiple of --eval_steps, or pass --resume_from_checkpoint auto."
        )
    # Without a checkpoint to resume from, a run would start anew, and replace or prune the checkpoints that are there.
    if reasons:
        raise CheckpointError(_describe_unreadable(output_dir, reasons))
    abandoned = store.list_aside(checkpoints, "abandoned")
    if abandoned:
        raise CheckpointError(_describe_abandoned(output_dir, abandoned))
    return Resolution(None, {})


def _resolve_path(output_dir: str | Path, request: str, thorough: bool) -> Resolution:
    """Return the checkpoint that the path of a checkpoint, or of a run, refers to."""
    path = Path(request).expanduser()
    checkpoints = store.folder_of(path)
    # The folder of a run has checkpoints in it, and no manifest. A folder with neither is taken for a damaged checkpoint.
    if (path / store.MANIFEST).exists() or not store.list_candidates(checkpoints):
        problem = store.find_damage(path, thorough=thorough)
        if problem is not None:
            raise CheckpointError(f"{problem}. {_suggest_older(path, thorough)}")
        return Resolution(path, {})
    own_checkpoints = store.folder_of(output_dir)
    if checkpoints.resolve() == own_checkpoints.resolve():
        # Use the path below ``output_dir``, since `store.set_aside` compares the skipped checkpoints with such paths.
        checkpoints = own_checkpoints
    resolution = _find_last_undamaged(store.list_candidates(checkpoints), thorough)
    if resolution.checkpoint is None:
        listing = _list_reasons(request, resolution.skipped)
        raise CheckpointError(f"{listing}\nMake one of them readable, or name another run or checkpoint.")
    return resolution


def _require_same_run(checkpoint: Path, output_dir: str | Path) -> None:
    """Raise `CheckpointError` if ``output_dir`` has checkpoints, and ``checkpoint`` is not one of them."""
    own_checkpoints = store.folder_of(output_dir)
    if checkpoint.resolve().parent == own_checkpoints.resolve():
        return
    complete = store.list_complete(own_checkpoints)
    if complete:
        raise CheckpointError(
            f"{checkpoint} is of another run than the {counted(len(complete), 'checkpoint')} in {output_dir}, the newest "
            f"{complete[-1].name}. With both in one folder, auto could not choose. Pass --resume_from_checkpoint auto to "
            "resume from those, or another --output_dir."
        )
    # Damaged and abandoned checkpoints belong to another run, too.
    problem = describe_unusable(output_dir)
    if problem is not None:
        raise CheckpointError(problem)


def _find_last_undamaged(checkpoints: list[Path], thorough: bool) -> Resolution:
    """Return the last of ``checkpoints`` that is not damaged, and the damaged ones after it as skipped."""
    skipped: dict[Path, str] = {}
    for checkpoint in reversed(checkpoints):
        problem = store.find_damage(checkpoint, thorough=thorough)
        if problem is None:
            return Resolution(checkpoint, skipped)
        skipped[checkpoint] = problem
    return Resolution(None, skipped)


def _suggest_older(damaged: Path, thorough: bool) -> str:
    """Return advice on what to resume from instead of a damaged checkpoint."""
    candidates = store.list_candidates(damaged.parent)
    damaged_step = store.step_before_suffix(damaged)
    # If a user has renamed the folder, its name may have no step. Then suggest the newest checkpoint beside it.
    if damaged_step is not None:
        candidates = [checkpoint for checkpoint in candidates if store.step_of(checkpoint) < damaged_step]
    older = _find_last_undamaged(candidates, thorough).checkpoint
    if older is None:
        return "There is no complete checkpoint before it in its folder. Name another run or checkpoint."
    return f"Use --resume_from_checkpoint {older}, the newest complete checkpoint before it."


# Returns the error message for a folder with checkpoints of which none can be read.
def _describe_unreadable(output_dir: str | Path, reasons: dict[Path, str]) -> str:
    return (
        f"{_list_reasons(output_dir, reasons)}\n"
        "Another run there would replace them. Make one of them readable, or give another --output_dir."
    )


def _list_reasons(folder: str | Path, reasons: dict[Path, str]) -> str:
    lines = "\n".join(f"  {reason}" for reason in reasons.values())
    return f"{folder}: it holds {counted(len(reasons), 'checkpoint')}, and none of them can be read:\n{lines}"


# Returns the error message for a folder with checkpoints that were all abandoned.
def _describe_abandoned(output_dir: str | Path, abandoned: list[Path]) -> str:
    names = ", ".join(checkpoint.name for checkpoint in abandoned)
    return (
        f"{output_dir}: all {counted(len(abandoned), 'checkpoint')} there are of branches that were abandoned: "
        f"{names}. Another run there would prune them. Go on from one with "
        f"--resume_from_checkpoint {abandoned[-1]}, or give another --output_dir."
    )

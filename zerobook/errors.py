"""The exceptions that a user can meet. Each message says what happened, the values that disagree, and what to do."""


class ZerobookError(Exception):
    """Base class of every error that a user can fix. Entry points print such an error without a traceback."""

    exit_code = 2
    """Exit code of a process that ends with this error."""


class ConfigError(ZerobookError):
    """A config, flag or strategy file that cannot work.

    Args:
        problems: every problem that was found, not only the first one, each a full sentence
            that starts with the dotted path or file it is about.
    """

    def __init__(self, problems: str | list[str]):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        listing = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(self.problems, 1))
        message = f"{len(self.problems)} problems in the configuration:\n{listing}"
        if len(self.problems) == 1:
            message = self.problems[0]
        super().__init__(message)


class LaunchError(ZerobookError):
    """A launch in which some processes did not start."""

    # Not 2, as for a wrong command line: another start may succeed.
    exit_code = 1


class DataError(ZerobookError):
    """Data that cannot be read, or that leaves nothing to train on."""


class SourceError(DataError):
    """Data that could not be read now, since a disk or the hub did not answer."""

    # Not 2, as for a wrong command line: another start may succeed.
    exit_code = 1


class CheckpointError(ZerobookError):
    """A checkpoint that is missing, incomplete, or does not fit this model."""


class SaveError(CheckpointError):
    """A checkpoint that could not be written."""

    # Not 2, as for a wrong command line: if the disk works again, another start continues the run.
    exit_code = 1


class DivergenceError(ZerobookError):
    """Training produced a loss or gradient that is not finite."""


class LockedError(ZerobookError):
    """A folder or file that another process has locked."""

    # Not 2, as for a wrong command line: when that process has ended, another start succeeds.
    exit_code = 1


class RunLogError(ZerobookError):
    """A runlog that cannot be written or read."""

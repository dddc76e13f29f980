"""Values of environment variables."""


def is_true(value: object) -> bool:
    """Return whether ``value`` is a word for true, in any case: ``1``, ``true`` or ``yes``. None is false."""
    return str(value).lower() in ("1", "true", "yes")

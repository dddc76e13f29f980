"""Values of environment variables."""


def is_true(value: object) -> bool:
    """Return whether a variable is set to a word for true."""
    return str(value).lower() in ("1", "true", "yes")

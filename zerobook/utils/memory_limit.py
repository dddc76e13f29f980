"""A limit on the memory that a piece of work takes from this process."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def memory_limit(size: int) -> Iterator[None]:
    """Return a context in which this process can take ``size`` bytes more than it has. Allocations beyond that fail.

    The limit holds for all threads: use it around short work, while others do not allocate much. Without Linux's ``/proc``
    there is no limit.

    Raises:
        MemoryError: an allocation of Python has failed.
    """
    try:
        # Unbuffered, since this is done for every rendering of a template.
        with open("/proc/self/statm", "rb", buffering=0) as pages:
            used = int(pages.read(64).split()[0]) * resource.getpagesize()
    except OSError:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = used + size
    # Keep a lower limit that is set already.
    if soft != resource.RLIM_INFINITY:
        limit = min(limit, soft)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))

"""A limit on the memory that a piece of work takes from this process."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def memory_limit(size: int) -> Iterator[None]:
    """Return a context in which this process can allocate ``size`` more bytes. Allocations beyond that fail.

    The limit is on all threads together, so use it around short work, while other threads allocate little. Without Linux's
    ``/proc`` there is no limit.

    Raises:
        MemoryError: Python code in the block exceeds the limit.
    """
    try:
        # The first number in statm is the size of the address space, in pages. This is read for every rendering of a template,
        # and an unbuffered read is faster.
        with open("/proc/self/statm", "rb", buffering=0) as statm:
            used = int(statm.read(64).split()[0]) * resource.getpagesize()
    except OSError:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = used + size
    # If the user has set a lower limit, it remains.
    if soft != resource.RLIM_INFINITY:
        limit = min(limit, soft)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))

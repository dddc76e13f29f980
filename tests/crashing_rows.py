"""A measurement whose process crashes, for tests/test_gpu_bench.py. It imports little, since it is started anew."""

import os
import signal


def rows_until_a_crash(number):
    yield {"measured": 1}
    yield {"measured": number}
    print("an unfinished line", end="")
    os.kill(os.getpid(), signal.SIGSEGV)

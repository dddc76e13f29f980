"""Finish ``make setup`` after the packages are installed: DeepSpeed's ops and the embedded model. Idempotent.

usage: setup.py [OP ...]    only these ops; without names, all that this machine can use
"""

import sys

from zerobook.data import embedded
from zerobook.launch import ops


def main() -> int:
    wanted = sys.argv[1:] or None
    print(f"[2/3] DeepSpeed's C++ ops: {', '.join(wanted or ops.OPS)} (minutes the first time, seconds afterwards)", flush=True)
    results = ops.compile_ops(wanted)
    print("[3/3] the embedded model, SmolLM2-135M-Instruct (about 30 s the first time)", flush=True)
    print(f"  {embedded.smollm2()}", flush=True)
    failed = [f"{op}: {what}" for op, what in results if what.startswith("FAILED")]
    if failed:
        print("set-up is not complete: " + "; ".join(failed), file=sys.stderr)
        return 1
    skipped = [f"{op} ({what.removeprefix('skipped: ')})" for op, what in results if what.startswith("skipped")]
    print("ready" + (f"; without {', '.join(skipped)}" if skipped else ""), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

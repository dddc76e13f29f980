"""Cost of checkpoints of SmolLM2-135M on two processes, each figure against another one measured in the same run.

    python benchmarks/checkpoint.py [--out benchmarks/results/checkpoint.json] [--folder DIR]

- a save, including digests, against a plain write and sync of the same bytes;
- the stall of a background save against copying the same bytes in memory;
- verifying, in bytes a second of one core;
- loading a checkpoint of another strategy against loading one of the same strategy;
- the memory of a save above what training holds.

Takes about five minutes and 5 GB of disk. It launches itself, once for each strategy, through ``accelerate launch``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROUNDS = 5


def memory(key: str) -> int:
    """Return the bytes of ``key`` in /proc/self/status, which are in kB there."""
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))


def one_rank(folder: Path, out: Path, phase: str) -> None:
    """Run one phase in a launched process."""
    flags = [
        "--model_name_or_path",
        "embedded:smollm2",
        "--dataset_name",
        "embedded:stdlib",
        "--output_dir",
        str(folder / "run"),
    ]
    flags += ["--output_dir", str(folder / "run")]
    sys.argv = [sys.argv[0], *flags, *(["--resume_from_checkpoint", "auto"] if phase == "load" else [])]
    import torch

    from zerobook.checkpoint import state, store
    from zerobook.checkpoint.progress import Progress
    from zerobook.checkpoint.save import Saver
    from zerobook.config import RecipeConfig
    from zerobook.config_sources import parse
    from zerobook.launch.build import build, resolve_this_process
    from zerobook.models.load import load_model

    config, sources, _ = parse(RecipeConfig)
    plan, config, _ = resolve_this_process(config, sources)
    strategy = build(config, plan)
    strategy.prepare(load_model(config, strategy), config, 1)
    strategy.materialise_optimizer()
    checkpoints = store.folder_of(config.output_dir)
    found: dict[str, list[float]] = {}

    def timed(name: str, work) -> None:
        strategy.barrier()
        start = time.perf_counter()
        work()
        strategy.barrier()
        found.setdefault(name, []).append(time.perf_counter() - start)

    steps = itertools.count(1)

    def save(saver: Saver) -> None:
        progress = Progress(step=next(steps), global_batch=plan.world_size * config.per_device_train_batch_size)
        saver.save(progress, {"asked": plan.asked, "config": config.model_dump()})

    if phase == "write":
        save(Saver(strategy, config.output_dir, keep=1))
    elif phase == "load":
        for _ in range(3):
            timed("load", lambda: state.load(strategy, store.list_complete(checkpoints)[-1]))
    else:
        mine = [piece.values.detach().cpu().clone() for piece in strategy.pieces()]
        spare = [torch.empty_like(values) for values in mine]
        raw = folder / f"raw-{strategy.rank}"

        def write_raw() -> None:
            with raw.open("wb") as file:
                for values in mine:
                    file.write(values.numpy().data)
                file.flush()
                os.fsync(file.fileno())

        here = Saver(strategy, config.output_dir, keep=None)
        behind = Saver(strategy, config.output_dir, keep=None, background=True)

        def copy() -> None:
            for source, target in zip(mine, spare, strict=True):
                target.copy_(source)

        # memory is returned to the kernel late: the memory of a save is its peak above what was held before
        before = memory("RssAnon")
        Path("/proc/self/clear_refs").write_text("5")
        save(here)
        extra = memory("VmHWM") - memory("RssFile") - memory("RssShmem") - before
        save(behind)
        behind.wait()
        for _ in range(ROUNDS):
            timed("raw", write_raw)
            raw.unlink()
            timed("save", lambda: save(here))
            timed("copy", copy)
            timed("stall", lambda: save(behind))
            behind.wait()
            strategy.barrier()
            if strategy.is_main:
                store.prune(checkpoints, 1)
        found["bytes"] = [sum(4 * values.numel() for values in mine)]
        found["extra"] = [extra]
        if strategy.is_main:
            for _ in range(3):
                start = time.perf_counter()
                assert store.find_damage(store.list_complete(checkpoints)[-1], thorough=True) is None
                found.setdefault("verify", []).append(time.perf_counter() - start)
            found["stored"] = [store.bytes_of(store.list_complete(checkpoints)[-1])]
        strategy.barrier()
    if strategy.is_main:
        out.write_text(json.dumps(found))
    from zerobook.launch.process import leave

    strategy.barrier()
    leave()


def launched(folder: Path, strategy: str, phase: str) -> dict[str, list[float]]:
    out = folder / f"{strategy}-{phase}.json"
    line = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", f"accelerate_configs/{strategy}.yaml"]
    line += ["--num_processes", "2", "--main_process_port", "0", __file__, "--phase", phase, "--folder", str(folder)]
    line += ["--out", str(out)]
    subprocess.run(line, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, timeout=900)
    return json.loads(out.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "checkpoint.json")
    parser.add_argument("--folder", type=Path, help="where to write; a disk like that of real runs")
    parser.add_argument("--phase", choices=["save", "write", "load"], help=argparse.SUPPRESS)
    known = parser.parse_args()
    if known.phase:
        return one_rank(known.folder, known.out, known.phase)
    import tempfile

    from zerobook.utils.versions import versions

    with tempfile.TemporaryDirectory(dir=known.folder) as name:
        folder = Path(name)
        saved = launched(folder, "zero2", "save")
        readers = ("zero2", "fsdp", "zero3", "ddp")
        loads = {"zero2": {reader: statistics.median(launched(folder, reader, "load")["load"]) for reader in readers}}
        for writer in readers[1:]:
            shutil.rmtree(folder / "run")
            launched(folder, writer, "write")
            loads[writer] = {r: statistics.median(launched(folder, r, "load")["load"]) for r in (writer, "zero2")}
    middle = {key: statistics.median(saved[key]) for key in ("raw", "save", "copy", "stall", "verify")}
    result = {
        "date": str(date.today()),
        "machine": {"cores": os.cpu_count(), "architecture": platform.machine(), "versions": versions()},
        "checkpoint_bytes": saved["stored"][0],
        "seconds": middle | {"load": loads},
        "save_rate_of_raw_write": round(middle["raw"] / middle["save"], 3),
        "background_stall_of_memory_copy": round(middle["stall"] / middle["copy"], 3),
        "verify_gigabytes_a_second": round(saved["stored"][0] / middle["verify"] / 1e9, 2),
        "load_of_the_writers_own": {
            f"{writer}, read under {reader}": round(seconds / loads[reader][reader], 3)
            for writer, found in loads.items()
            for reader, seconds in found.items()
            if reader != writer
        },
        "extra_memory_of_a_save_bytes": saved["extra"][0],
        "all": saved,
    }
    known.out.parent.mkdir(parents=True, exist_ok=True)
    known.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "all"}, indent=1))


if __name__ == "__main__":
    main()

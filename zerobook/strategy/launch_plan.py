"""The strategy of a launch as plain facts, known before any process group exists."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(kw_only=True)
class LaunchPlan:
    """The resolved launch of a strategy file on this machine, known before any process group exists."""

    kind: str  # "single", "ddp", "deepspeed" or "fsdp"
    world_size: int
    device: str
    backend: str | None
    precision: str
    precision_source: str
    zero_stage: int | None = None
    offload_optimizer: str = "none"
    offload_param: str = "none"
    secondary: int = 1  # ZeRO-3 with hpZ: processes of a node, which share a second copy of the weights; 1 is without
    replicate: int = 1  # FSDP: groups that hold copies of each other (hybrid sharding)
    shard: int = 1  # FSDP: processes that share one copy
    sequence: int = 1  # processes that share the tokens of a sample, by DeepSpeed-Ulysses
    context: int = 1  # processes that share the tokens of a sample, by FSDP2's context parallelism
    tensor: int = 1  # processes that share every weight matrix, and compute the same samples
    experts: int = 1  # processes that share the experts of each layer, and compute different samples
    rank_0_loads: bool = False  # FSDP: the other processes get the weights from it, and read none
    optimizer: str = "adamw"  # as --optimizer says
    host_threads: int | None = None  # per process, for an optimizer in host memory; None keeps the environment's setting
    config_file: str | None = None
    deepspeed_config: dict[str, Any] | None = None
    asked: dict[str, Any] = field(default_factory=dict)  # the config before a resumed run's batch is cut anew
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """A short name for people: ``ZeRO-3 (optimizer: cpu)``, ``ZeRO-3 hpZ 2x8``, ``FSDP2 2x2``, ``DDP``."""
        if self.kind == "deepspeed":
            parts = [f"{what}: {where}" for what, where in
                     (("optimizer", self.offload_optimizer), ("parameters", self.offload_param))
                     if where != "none"]  # fmt: skip
            groups = f" hpZ {self.world_size // self.secondary}x{self.secondary}" if self.secondary > 1 else ""
            groups += f" sequence {self.sequence}" if self.sequence > 1 else ""
            return f"ZeRO-{self.zero_stage}{groups}" + (f" ({', '.join(parts)} offload)" if parts else "")
        if self.kind == "fsdp":
            offload = " (cpu offload)" if self.offload_param != "none" else ""
            groups = f" hybrid {self.replicate}x{self.shard}" if self.replicate > 1 else ""
            groups += f" context {self.context}" if self.context > 1 else ""
            groups += f" tensor {self.tensor}" if self.tensor > 1 else ""
            groups += f" experts {self.experts}" if self.experts > 1 else ""
            return f"FSDP2{groups}{offload}"
        return {"single": "one process", "ddp": "DDP"}[self.kind]

    @property
    def data_parallel_size(self) -> int:
        """Groups of processes that read different samples."""
        return self.world_size // (self.sequence * self.context * self.tensor)

    def copies_at_load(self, processes: int) -> int:
        """Return the number of copies of the weights that the processes of a host load. ZeRO-3 shards while loading."""
        if self.zero_stage == 3 or self.loaded_in_parts:
            return 0
        return 1 if self.rank_0_loads else processes

    @property
    def loaded_in_parts(self) -> bool:
        """Each process reads its part of the weights from the files: tensor and expert parallelism."""
        return self.tensor > 1 or self.experts > 1

    @property
    def line(self) -> str:
        """The line that a run prints about its strategy."""
        where = f"{self.world_size} x {self.device}" + (f" over {self.backend}" if self.backend else "")
        return f"strategy {self.name} | {where} | precision {self.precision} ({self.precision_source})"

    def record(self) -> dict[str, Any]:
        """JSON-ready facts for the runlog and doctor; ``deepspeed_config`` is as resolved in memory."""
        return {"name": self.name, **asdict(self)}

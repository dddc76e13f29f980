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
    secondary: int = 1  # ZeRO-3 with hpZ: processes of a node, which share a second copy of the weights; 1 if there is none
    replicate: int = 1  # FSDP: groups that hold copies of each other (hybrid sharding)
    shard: int = 1  # FSDP: processes that share one copy
    reshards: bool = True  # FSDP: weights are freed after a layer's forward pass
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
        # The names are part of messages and of the runlog, and each strategy's ``describe`` makes the same ones.
        if self.kind == "deepspeed":
            return format_zero_name(
                self.zero_stage,
                world_size=self.world_size,
                secondary=self.secondary,
                sequence=self.sequence,
                optimizer_device=self.offload_optimizer,
                parameter_device=self.offload_param,
            )
        if self.kind == "fsdp":
            groups = ["FSDP2"]
            if self.replicate > 1:
                groups.append(f"hybrid {self.replicate}x{self.shard}")
            if self.context > 1:
                groups.append(f"context {self.context}")
            if self.tensor > 1:
                groups.append(f"tensor {self.tensor}")
            if self.experts > 1:
                groups.append(f"experts {self.experts}")
            if self.offload_param != "none":
                groups.append("(cpu offload)")
            return " ".join(groups)
        return {"single": "one process", "ddp": "DDP"}[self.kind]

    @property
    def swap_folders(self) -> list[str]:
        """The folders under which NVMe offload writes."""
        zero = (self.deepspeed_config or {}).get("zero_optimization", {})
        sections = [zero.get(key) or {} for key in ("offload_optimizer", "offload_param")]
        paths = {section.get("nvme_path") for section in sections if section.get("device") == "nvme"}
        # A value of another type is a problem of the launch.
        return sorted(path for path in paths if isinstance(path, str))

    @property
    def data_parallel_size(self) -> int:
        """Groups of processes that read different samples."""
        return self.world_size // (self.sequence * self.context * self.tensor)

    @property
    def replica_groups(self) -> list[list[int]]:
        """Groups of ranks that hold the same part of the weights; empty if no rank has a copy of another's."""
        if self.world_size == 1 or self.zero_stage == 3:
            return []
        if self.kind != "fsdp":
            return [list(range(self.world_size))]
        if self.replicate == 1:
            return []
        # Hybrid sharding: the ranks of a replica are adjacent, so ranks at the same position in their replicas form a group.
        replica_size = self.world_size // self.replicate
        return [list(range(position, self.world_size, replica_size)) for position in range(replica_size)]

    def copies_at_load(self, processes: int) -> int:
        """Return the number of complete copies of the weights that the ``processes`` of a host load."""
        # Under ZeRO-3, each weight is sharded as soon as it is loaded.
        if self.zero_stage == 3 or self.is_loaded_in_parts:
            return 0
        return 1 if self.rank_0_loads else processes

    @property
    def is_loaded_in_parts(self) -> bool:
        """Whether each process reads only its part of the weights from the files: under tensor and expert parallelism."""
        return self.tensor > 1 or self.experts > 1

    @property
    def line(self) -> str:
        """The line that a run prints about its strategy."""
        processes = f"{self.world_size} x {self.device}"
        if self.backend:
            processes += f" over {self.backend}"
        return f"strategy {self.name} | {processes} | precision {self.precision} ({self.precision_source})"

    def record(self) -> dict[str, Any]:
        """Return JSON-ready facts for the runlog and doctor. ``deepspeed_config`` has the resolved values."""
        return {"name": self.name, **asdict(self)}


def format_zero_name(
    stage: int | None, *, world_size: int, secondary: int, sequence: int, optimizer_device: str, parameter_device: str
) -> str:
    """Return the name of a ZeRO strategy, as `LaunchPlan.name`.

    Args:
        secondary: processes that share a second copy of the weights (hpZ); 1 if there is none.
        sequence: processes that share the tokens of a sample.
        optimizer_device: where the optimizer's state is offloaded to, or ``none``.
        parameter_device: where the weights are offloaded to, or ``none``.
    """
    name = f"ZeRO-{stage}"
    if secondary > 1:
        name += f" hpZ {world_size // secondary}x{secondary}"
    if sequence > 1:
        name += f" sequence {sequence}"
    offloads = []
    if optimizer_device != "none":
        offloads.append(f"optimizer: {optimizer_device}")
    if parameter_device != "none":
        offloads.append(f"parameters: {parameter_device}")
    return f"{name} ({', '.join(offloads)} offload)" if offloads else name

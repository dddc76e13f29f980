"""What the rest of the project asks instead of branching on how a run is spread."""

from zerobook.strategy.base import MOMENTS, Piece, ReplicatedStrategy, Strategy

__all__ = ["MOMENTS", "Piece", "ReplicatedStrategy", "Strategy"]

"""What the rest of the project asks instead of branching on how a run is spread."""

from zerobook.strategy.base import Piece, ReplicatedStrategy, Strategy

__all__ = ["Piece", "ReplicatedStrategy", "Strategy"]

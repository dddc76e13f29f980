"""What the rest of the project asks instead of branching on how a run is spread."""

from zerobook.strategy.base import ReplicatedStrategy, Strategy
from zerobook.strategy.pieces import Piece

__all__ = ["Piece", "ReplicatedStrategy", "Strategy"]

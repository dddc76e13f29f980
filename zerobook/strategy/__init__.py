"""How a run is spread: one optimizer step, and the state by parameter name, under every strategy."""

from zerobook.strategy.base import MOMENTS, Piece, ReplicatedStrategy, Strategy

__all__ = ["MOMENTS", "Piece", "ReplicatedStrategy", "Strategy"]

"""How a run is spread: one optimizer step, and the state by parameter name, under every strategy."""

from zerobook.strategy.base import ReplicatedStrategy, Strategy
from zerobook.strategy.pieces import Piece

__all__ = ["Piece", "ReplicatedStrategy", "Strategy"]

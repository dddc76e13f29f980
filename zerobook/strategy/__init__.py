"""Strategies that distribute a run: one optimizer step, and the state by parameter name, under each of them."""

from zerobook.strategy.base import ReplicatedStrategy, Strategy
from zerobook.strategy.pieces import Piece

__all__ = ["Piece", "ReplicatedStrategy", "Strategy"]

"""Strategies that distribute a run: one optimizer step, and the state by parameter name, under each of them."""

from zerobook.strategy.base import Strategy
from zerobook.strategy.pieces import Piece
from zerobook.strategy.replicated import ReplicatedStrategy

__all__ = ["Piece", "ReplicatedStrategy", "Strategy"]

"""Evaluation: held-out loss, generation, multiple-choice tasks, and results loaded from their folders."""

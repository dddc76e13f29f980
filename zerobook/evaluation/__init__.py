"""Evaluation: held-out loss, generation and multiple-choice tasks."""

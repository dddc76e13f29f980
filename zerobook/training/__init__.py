"""Training: recipes, objectives, optimizers, hooks, and the loop that brings them together."""

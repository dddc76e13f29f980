"""Training: recipes, hooks, and the trainer that runs them."""

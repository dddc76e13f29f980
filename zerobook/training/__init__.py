"""Parts of the training that a user can replace."""

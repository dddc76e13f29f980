"""Import of other trainers' configs: a table for each trainer, and the account of every key."""

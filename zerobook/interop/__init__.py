"""What goes between Zerobook and other trainers: their configs and their checkpoints."""

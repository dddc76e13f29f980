"""The run: its state, its steps, and the hooks around them."""

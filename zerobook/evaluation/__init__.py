"""What a trained model can do: results loaded back from their folders, and tasks that measure them."""

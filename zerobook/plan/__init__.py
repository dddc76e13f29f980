"""What a run will hold, send and take, before it is started."""

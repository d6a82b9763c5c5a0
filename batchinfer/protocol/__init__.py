"""Messages between a controller and its ranks, and the channel that carries them. No torch."""

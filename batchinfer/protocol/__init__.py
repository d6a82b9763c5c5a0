"""What goes between a controller and its ranks: the messages, and the channel that carries them. No torch."""

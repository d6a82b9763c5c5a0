"""How far a run is, read from its folder alone while others work on it."""

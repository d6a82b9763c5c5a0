"""Work units of a run: who computes them, and their results. One protocol, wherever the run folder is kept."""

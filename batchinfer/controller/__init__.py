"""Planned units in; completions, durable on disk, out: claims, dealing to ranks, blame, results. No torch."""

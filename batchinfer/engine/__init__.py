"""Engine: planned requests in; completions, durable on disk, out. The controller commits, the worker computes."""

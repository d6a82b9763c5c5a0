"""DeepSeek's libraries for Hopper GPUs as implementations: `ops` has the operations, `libraries` the functions."""

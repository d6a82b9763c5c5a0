"""DeepSeek's libraries for Hopper GPUs behind the operations they have: `ops`; `libraries` finds their functions."""

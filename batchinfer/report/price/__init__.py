"""Price lists, and the arithmetic of cost, revenue and margin."""

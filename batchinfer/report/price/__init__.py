"""Prices as data, and the arithmetic of cost, revenue and margin."""

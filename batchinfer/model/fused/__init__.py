"""Layers and decode steps as single C++ calls, where weights and widths allow it; same bits as the plain path."""

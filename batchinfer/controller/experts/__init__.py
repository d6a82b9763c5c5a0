"""Placement of experts on ranks while a job runs: measured loads, proposals, moves, statistics."""

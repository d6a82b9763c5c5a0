"""Formats of input files: for each one, rows are counted, the schema is found, and rows are read in batches.

Parquet and Arrow files have a schema. JSONL and CSV are files of lines: a first pass counts rows and finds types
(values.py), later passes read batches of rows (line_rows.py); a bad line is a row with an error sentence.
"""

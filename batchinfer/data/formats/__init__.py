"""What an input file may be: how each format is counted, what columns it has, and how it is read in batches.

Parquet and Arrow know their columns. JSONL and CSV are lines: a first pass finds rows and types (values.py), further
ones read batches of them (line_rows.py), in which a bad line is a row with a sentence.
"""

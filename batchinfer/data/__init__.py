"""Data: shards in; checked, tokenised rows out; and every table's columns.

In: the user's shards, the model folder's tokenizer and template. Out: tokens/<shard>.parquet, results, outputs.
"""

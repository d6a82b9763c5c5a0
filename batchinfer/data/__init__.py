"""Data: input shards are read, checked and tokenised; and the columns of every table of a run folder.

Reads the user's shards and the model folder's tokenizer and chat template; writes tokens/<shard>.parquet.
"""

"""What a finished run did and cost. In: the Parquet tables of run folders. Out: figures, tables and answers to SQL."""

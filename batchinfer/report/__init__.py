"""Reports on finished runs. In: the Parquet tables of run folders. Out: figures, tables and answers to SQL queries."""

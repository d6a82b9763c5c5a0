"""Plan: tokenised rows in; ordered work units and predictions out (plan/*.parquet). No model is loaded here."""

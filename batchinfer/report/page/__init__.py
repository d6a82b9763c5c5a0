"""The page of finished runs: one HTML file without script and without anything from elsewhere."""

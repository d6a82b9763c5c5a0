"""From durable results to outputs and statistics: every input row once, in input order."""

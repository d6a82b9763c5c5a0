"""Private connections between the processes of a job: credentials, streams, a listener. No torch."""

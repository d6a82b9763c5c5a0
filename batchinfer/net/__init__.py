"""Connections between the processes of a job that nobody else can join: credentials, streams, a listener. No torch."""

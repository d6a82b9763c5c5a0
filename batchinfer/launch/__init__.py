"""The processes of a job's ranks: started early, met, watched, killed, and started again when one dies. No torch."""

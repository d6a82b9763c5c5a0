"""The commands, by groups. Each imports its functions inside, so that `report` starts without torch."""

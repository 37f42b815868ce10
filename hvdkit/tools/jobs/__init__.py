"""Commands for the running hvdrun jobs of this user on this host."""

"""hvdkit bench: measures hvdkit on the user's machine or cluster, beside the installed peers."""

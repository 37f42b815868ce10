"""hvdkit bench: the user's own machine or cluster, measured beside the peers that are installed."""

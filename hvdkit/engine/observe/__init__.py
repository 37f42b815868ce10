"""What is recorded and reported: timeline, stalls, stragglers, profiles."""

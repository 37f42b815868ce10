"""Where numbers go: what a script logs, averaged over the ranks, and hvdkit's own series; progress of the job."""

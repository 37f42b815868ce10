"""hvdkit submit: write the batch script of a job, hand it to the scheduler, follow its log."""

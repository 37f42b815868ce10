"""hvdkit submit: writes the batch script of a job, submits it to the scheduler and follows its log."""

"""hvdkit profile: where the time of a training job goes."""

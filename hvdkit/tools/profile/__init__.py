"""hvdkit profile: shows how a training job spends its time."""

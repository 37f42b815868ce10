"""Rules of training that every framework shares: which samples a rank sees, learning rates for large batches."""

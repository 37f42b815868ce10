"""hvdkit compare: checks that training on many ranks equals training on one rank with the same batches."""

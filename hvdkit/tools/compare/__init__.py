"""hvdkit compare: is the training on many ranks the same as on one with the same batches?"""

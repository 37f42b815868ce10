"""What Ray's and Spark's workers need to be ranks; neither of the two is imported here."""

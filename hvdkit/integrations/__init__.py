"""Functions that make Ray's and Spark's workers ranks; neither of the two is imported here."""

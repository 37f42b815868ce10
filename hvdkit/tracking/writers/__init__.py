"""Writers: a file for each place that numbers go to."""

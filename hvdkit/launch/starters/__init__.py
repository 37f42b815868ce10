"""What starts ranks: a file for each program, from a job to its command line. Nothing is started here."""

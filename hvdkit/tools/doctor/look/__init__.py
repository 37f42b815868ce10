"""What sees facts: a file a subject, and collect, which asks them all."""

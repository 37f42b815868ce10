"""Launchers: from a job to the command line that starts its ranks. Nothing is started here."""

"""hvdrun's command line: options, their help and their checks."""

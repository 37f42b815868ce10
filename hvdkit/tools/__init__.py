"""Tools that a user runs beside training: they build, examine and measure."""

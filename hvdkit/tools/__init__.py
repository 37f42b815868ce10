"""Tools that a person runs beside training: building, looking, measuring."""

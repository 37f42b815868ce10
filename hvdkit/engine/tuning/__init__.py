"""Autotune: the first steps of a run try several settings of the engine, the rest is done with the best."""

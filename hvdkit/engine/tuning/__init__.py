"""Autotune: the first steps of a run try several settings of the engine, the other steps use the best."""

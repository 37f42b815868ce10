"""Autotune: the first steps of a run tried with several settings of the engine, and the rest done with the best."""

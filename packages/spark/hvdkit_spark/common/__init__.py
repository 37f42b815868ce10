"""Shared code of the estimators of all frameworks."""

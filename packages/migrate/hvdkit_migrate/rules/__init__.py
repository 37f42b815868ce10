"""The rules, a subject in each file. A rule reads a Draft and adds findings to it."""

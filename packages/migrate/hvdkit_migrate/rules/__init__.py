"""What changes in a script, a subject a file. A rule looks at a Draft and adds findings to it."""

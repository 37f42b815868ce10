"""A folder for PYTHONPATH, from which Python imports the module `sitecustomize` at its start."""

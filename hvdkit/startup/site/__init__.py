"""A folder to be put on PYTHONPATH; it has one module, `sitecustomize`."""

"""Several hosts: an agent on each, the connections between them, and a small job on all."""

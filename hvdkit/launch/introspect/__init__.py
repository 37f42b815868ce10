"""What a running job is doing, and which ranks others wait for."""

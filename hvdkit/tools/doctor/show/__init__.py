"""What doctor prints."""

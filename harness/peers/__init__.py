"""What peers get wrong, and why."""

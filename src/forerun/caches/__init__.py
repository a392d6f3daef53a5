"""What the model has read: one cache a file."""

"""What may come next: one drafter a file."""
